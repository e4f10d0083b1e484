"""What stress is made of, without ranks: its size, its jitter, guard bands, spoilt inputs, and blocks in any order."""

import base64
import itertools
import math
import os
import re
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerlane import problems
from peerlane.common.place import GPUS
from peerlane.errors import CaseTooLarge, HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.correctness import case_runner as runner_module
from peerlane.evaluate.correctness import jitter, stress
from peerlane.evaluate.correctness.case_runner import CaseRunner, Evidence
from peerlane.evaluate.correctness.jitter import Jitter
from peerlane.evaluate.correctness.stress import Stress, choose_compared, choose_slots, draw_jitter, draw_time_slicing
from peerlane.evaluate.memory.arena import GUARD_BYTES, POISON, Arena, extent
from peerlane.evaluate.memory.guards import GuardBands, Region, argument_regions
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, place_slots
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.fork_client import memory_file
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.rank_interface import CandidateInterface
from peerlane.evaluate.ranks import candidate
from peerlane.evaluate.ranks.trusted import TrustedRank
from peerlane.evaluate.timing import cache_flush
from peerlane.problems.contract import Draw, describe, tensor_descriptions
from peerlane.settings import Deadlines, StressRules

RULES = StressRules()
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("call_s", "judge_s", "slots"),
    [
        (1e-5, 1e-4, RULES.max_slots),
        (RULES.budget_s / 120, RULES.budget_s / 120, 15),  # a quarter of the time for one pass
        (10.0, 10.0, RULES.min_slots),
        (0.0, 0.0, RULES.max_slots),
    ],
)
def test_a_pass_is_as_long_as_time_allows(call_s: float, judge_s: float, slots: int) -> None:
    assert choose_slots(call_s, judge_s, RULES) == slots


@pytest.mark.parametrize(("judge_s", "count"), [(1e-3, 20), (RULES.budget_s / 16, 5), (100.0, 2)])
def test_the_last_call_and_some_that_others_followed_are_compared(judge_s: float, count: int) -> None:
    order = [7, 3, *range(8, 20), 0, 1, 2, 4, 5, 6]
    chosen = [choose_compared(order, judge_s, RULES) for _ in range(300)]
    assert all(len(set(slots)) == count and 6 in slots for slots in chosen)
    assert {slot for slots in chosen for slot in slots} == set(order)


@pytest.mark.parametrize(
    ("calls", "passes", "seconds_left", "goes_on"),
    [
        (0, 0, -100.0, True),  # one pass there must be
        (RULES.calls, 1, -100.0, True),  # and a late one
        (RULES.min_calls - 1, 2, -RULES.overtime_s / 2, True),
        (RULES.min_calls - 1, 2, -RULES.overtime_s * 2, False),
        (RULES.min_calls, 2, -0.1, False),
        (RULES.calls - 1, 2, 10.0, True),
        (RULES.calls, 2, 10.0, False),
    ],
)
def test_passes_end_with_the_calls_or_the_time(calls: int, passes: int, seconds_left: float, goes_on: bool) -> None:
    assert (
        Stress(None, RULES)._goes_on(  # type: ignore[arg-type]
            calls, passes, time.monotonic() + seconds_left
        )
        == goes_on
    )


class ScriptedRanks:
    """Stands for a group: gives the answers of a script to the requests that it has answers for, and nods to all others."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers

    def ask(self, request: Request[Any], phase: str, deadline_s: float, **_: Any) -> list[Any]:
        return self.answers.get(request.op, [None, None])


UNTOUCHED = wire.OutputComparison(None, None)


def looked_again(*answers: wire.OutputComparison, ended: float = 0.0) -> None:
    session = types.SimpleNamespace(trusted=ScriptedRanks(compare_output=list(answers)), deadlines=Deadlines())
    problem = problems.get(1)
    runner = CaseRunner(session, ScriptedRanks(), problem, problem.cases("small", 2)[0], "check", 4)  # type: ignore[arg-type]
    runner.recheck_output(2, "stress", ended)


def test_a_second_look_comes_when_enough_time_has_passed_since_the_end_and_no_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done meanwhile was waiting too."""
    waited: list[float] = []
    monkeypatch.setattr(runner_module, "time", types.SimpleNamespace(monotonic=lambda: 100.0, sleep=waited.append))
    for ended in (100.0, 100.0 - runner_module._SETTLING_S / 3, 99.0):
        looked_again(UNTOUCHED, UNTOUCHED, ended=ended)
    assert waited == pytest.approx([runner_module._SETTLING_S, runner_module._SETTLING_S * 2 / 3, 0.0])


def test_one_rank_at_a_time_is_held_up_for_times_of_every_magnitude() -> None:
    calls = 20_000
    plans = draw_jitter(4, calls, on_gpu=False)
    assert all({way for _, way, _ in plan} == {"host"} for plan in plans)
    positions = [position for plan in plans for position, _, _ in plan]
    assert len(positions) == len(set(positions)) and set(positions) <= set(range(calls))
    assert len(positions) / calls == pytest.approx(stress._DELAYED_CALLS, rel=0.1)
    delays_us = [us for plan in plans for _, _, us in plan]
    assert min(delays_us) >= stress._SHORTEST_DELAY_US and max(delays_us) <= stress._LONGEST_DELAY_US
    for decade in (1, 2, 3):  # as many between 10 and 100 us as between 1 and 10 ms
        share = sum(decade <= math.log10(us) < decade + 1 for us in delays_us) / len(delays_us)
        assert share == pytest.approx(1 / 3, rel=0.15)


def test_on_gpus_streams_wait_too_and_sms_are_held_in_a_part_of_the_passes() -> None:
    passes = [{way for plan in draw_jitter(2, 200, on_gpu=True) for _, way, _ in plan} for _ in range(100)]
    assert all({"host", "stream"} <= ways <= {"host", "stream", "hold_sms"} for ways in passes)
    assert 20 <= sum("hold_sms" in ways for ways in passes) <= 80


def test_one_gpu_is_shared_in_some_passes_behind_the_first_two() -> None:
    drawn = [draw_time_slicing(passes, 4, on_gpu=True) for passes in range(2, 3000)]
    shared = [rank for rank in drawn if rank is not None]
    assert len(shared) / len(drawn) == pytest.approx(stress._SLICED_PASSES, rel=0.1)
    assert all(shared.count(rank) / len(shared) == pytest.approx(1 / 4, rel=0.3) for rank in range(4))
    assert not any(draw_time_slicing(passes, 4, on_gpu=True) is not None for passes in (0, 1) for _ in range(100))
    assert all(draw_time_slicing(passes, 2, on_gpu=False) is None for passes in range(200)), "CPU ranks share none"


@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_a_trusted_rank_is_busy_for_as_long_as_it_is_told(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = PretendedGpu(monkeypatch)
    rank = TrustedRank({"world_size": 2, "device": "cpu"}, 0, -1)
    rank.keep_device_busy(seconds)
    assert seconds <= gpu.now < seconds + 0.003 and (gpu.pieces > 0) == (seconds > 0)


class StressedRunner:
    """Stands for a trial under stress whose passes take ``pass_s`` on a clock of its own, twice that where a GPU is shared."""

    slots, layouts, judge_s, call_s, alike = 25, [{}, {}], 1e-4, 1e-5, [-1] * 25

    def __init__(self, pass_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pass_s, self.now, self.evidence = pass_s, 0.0, Evidence()
        self.session = types.SimpleNamespace(place=GPUS, deadlines=Deadlines())
        self.problem = self.case = self.space = None
        self.deadline = lambda seconds, calls: seconds
        self.candidate = types.SimpleNamespace(call_under_stress=self.call_under_stress)
        self.sharing: int | None = None
        self.passes: list[tuple[int | None, float]] = []
        monkeypatch.setattr(stress, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    @contextmanager
    def time_slicing(self, rank: int | None, seconds: float) -> Iterator[None]:
        self.passes.append((rank, seconds))
        self.sharing = rank
        yield
        self.sharing = None

    def call_under_stress(self, requests: list[Request[wire.Outputs]], deadline_s: float) -> list[wire.Outputs]:
        assert len(requests) == 2 and requests[0].arguments["order"] == requests[1].arguments["order"]
        self.now += self.pass_s if self.sharing is None else 2 * self.pass_s
        return [[{}] * len(request.arguments["order"]) for request in requests]

    def __getattr__(self, name: str) -> Callable[..., None]:
        assert name in {"generate_inputs", "publish_inputs", "collect_from", "recheck_output", "judge"}
        assert self.sharing is None, "the trusted ranks are busy"
        return lambda *_, **__: None


@pytest.mark.parametrize(("pass_s", "busy_s"), [(1e-3, stress._SHORTEST_SLICING_S), (0.02, 0.02), (0.5, stress._LONGEST_SLICING_S)])
def test_a_gpu_is_kept_busy_for_as_long_as_a_pass_takes_that_shares_none(
    pass_s: float, busy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = StressedRunner(pass_s, monkeypatch)
    Stress(runner, StressRules(calls=25 * 100)).run(math.inf)  # type: ignore[arg-type]
    ranks, seconds = zip(*runner.passes, strict=True)
    assert len(ranks) == 100 and ranks[:2] == (None, None) and set(ranks) == {None, 0, 1}
    assert seconds[1:] == pytest.approx([busy_s] * 99)  # also right behind a pass that shared one, and took longer for it


class OrderedRunner(StressedRunner):
    """One whose slots are alike, and which writes down what its calls are asked."""

    alike = [0] * 25

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(1e-3, monkeypatch)
        self.asked: list[list[Request[wire.Outputs]]] = []
        self.collected: list[tuple[set[int], set[int]]] = []
        """of every pass, the slots that are compared, and those whose inputs are"""
        self.again: list[int] = []
        self.judged: list[int] = []
        """how many passes had been collected"""

    def judge(self, phase: str) -> None:
        self.judged.append(len(self.collected))

    def call_under_stress(self, requests: list[Request[wire.Outputs]], deadline_s: float) -> list[wire.Outputs]:
        self.asked.append(requests)
        return super().call_under_stress(requests, deadline_s)

    def collect_from(self, outputs: Any, chosen: list[int], phase: str, contents: list[int], intact: set[int]) -> None:
        self.collected.append((set(chosen), set(intact)))

    def recheck_output(self, slot: int, phase: str, ended: float) -> None:
        self.again.append(slot)


def test_every_pass_disturbs_as_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads inputs late finds them overwritten; who reads them early reads those of another call."""
    runner = OrderedRunner(monkeypatch)
    Stress(runner, StressRules(calls=25 * 200)).run(math.inf)  # type: ignore[arg-type]
    passes = [types.SimpleNamespace(**requests[0].arguments) for requests in runner.asked]
    assert runner.judged == list(range(1, 201)), "each pass is judged"
    assert all(sorted(request.order) == list(range(25)) for request in passes)
    for first, second in runner.asked:
        assert {**first.arguments, "jitter": ()} == {**second.arguments, "jitter": ()}, "ranks do the same"
    calls = 25 * len(passes)
    assert 0.4 < sum(len(request.poisoned) for request in passes) / calls < 0.6
    assert 0.15 < sum(len(request.kept) for request in passes) / calls < 0.25, "of most calls the inputs are overwritten"
    late = [bool(request.swaps) for request in passes]
    assert late[:2] == [False, True] and 0.5 < sum(late) / len(late) < 0.85
    assert all(len(request.swaps) == 24 for request in passes if request.swaps), "each call but the last"
    repeated = [after.order == before.order for before, after in itertools.pairwise(passes)]
    assert repeated == late[1:], "a late pass has the order of the one before, any other a new one"
    for request, (compared, intact), again in zip(passes, runner.collected, runner.again, strict=True):
        assert again == request.order[-1] and again in compared, "the last output is looked at again"
        assert intact == {request.order[position] for position in [*request.kept, -1]}


class NotedRanks:
    """Stands for a group that writes down what it is asked, and fails if it is told to."""

    def __init__(self, name: str, log: list[Any], failure: GroupFailure | None = None) -> None:
        self.name, self.log, self.failure = name, log, failure

    def begin(self, requests: list[Request[Any]], phase: str, deadline_s: float, **_: Any) -> None:
        self.log.append((self.name, [(request.op, request.arguments.get("seconds")) for request in requests]))

    def finish(self) -> list[Any]:
        self.log.append(f"{self.name} done")
        if self.failure is not None:
            raise self.failure
        return [None] * 4

    def ask(self, requests: list[Request[Any]], phase: str, deadline_s: float, **_: Any) -> list[Any]:
        self.begin(requests, phase, deadline_s)
        return self.finish()

    def log_tail(self) -> str:
        return "printed"


def ask_beside_a_busy_gpu(
    rank: int | None, *, trusted: GroupFailure | None = None, candidate: GroupFailure | None = None
) -> tuple[list[Any], Exception | None]:
    """What happens, and what is raised."""
    log: list[Any] = []
    session = types.SimpleNamespace(
        trusted=NotedRanks("trusted", log, trusted), place=GPUS, deadlines=Deadlines(), drop_trusted=lambda: log.append("trusted dropped")
    )
    problem, group = problems.get(1), NotedRanks("candidate", log, candidate)
    runner = CaseRunner(session, group, problem, problem.cases("small", 4)[0], "check", 4, layouts=[{}] * 4)  # type: ignore[arg-type, list-item]
    try:
        with runner.time_slicing(rank, 0.03):
            runner.candidate.call_under_stress([Request(CandidateInterface.call_under_stress, "check", [], [], [], [], ())] * 4, 1.0)
    except Exception as error:
        return log, error
    return log, None


ASKED = [("candidate", [("call_under_stress", None)] * 4), "candidate done"]
BESIDE = [("trusted", [("keep_device_busy", seconds) for seconds in (0.0, 0.03, 0.0, 0.0)]), *ASKED, "trusted done"]


@pytest.mark.parametrize(("rank", "happens"), [(1, BESIDE), (None, ASKED)])
def test_a_trusted_rank_is_busy_while_the_candidate_is_asked(rank: int | None, happens: list[Any]) -> None:
    assert ask_beside_a_busy_gpu(rank) == (happens, None)


def test_busy_trusted_ranks_are_awaited_when_the_candidate_fails() -> None:
    failure = GroupFailure("hang", "stress", "no answer", ranks=(0,), deadline_s=1.0)
    assert ask_beside_a_busy_gpu(1, candidate=failure) == (BESIDE, failure)


@pytest.mark.parametrize("candidate", [None, GroupFailure("exit", "stress", "rank 0 exited", rank=0)])
def test_a_busy_trusted_rank_that_fails_is_the_harness_fault(candidate: GroupFailure | None) -> None:
    failure = GroupFailure("exit", "correctness", "rank 1 exited", rank=1)
    log, error = ask_beside_a_busy_gpu(1, trusted=failure, candidate=candidate)
    assert isinstance(error, HarnessError) and "keep_device_busy" in str(error) and log == [*BESIDE, "trusted dropped"]


def test_trusted_ranks_without_memory_say_that_the_case_is_too_large() -> None:
    log, error = ask_beside_a_busy_gpu(1, trusted=GroupFailure("out_of_memory", "correctness", "CUDA out of memory", rank=2))
    assert isinstance(error, CaseTooLarge) and log[-1] == "trusted dropped"
    assert re.search(r"small.* needs more memory .* rank 2 ran out of it at keep_device_busy; use more ranks", str(error))


class PretendedGpu:
    """A GPU and its host on one clock: enqueuing takes 50 us, a piece 700."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.idle_from = 0.0, 0.0
        self.left_idle_s, self.most_ahead_s = 0.0, 0.0
        self.pieces = 0
        monkeypatch.setattr(jitter, "_device_sleep", self.enqueue)
        monkeypatch.setattr(jitter, "_event", self.event)
        monkeypatch.setattr(jitter, "_clock", lambda: self.now)

    def enqueue(self, cycles: int) -> None:
        self.pieces += 1
        self.now += 50e-6
        self.left_idle_s += max(0.0, self.now - self.idle_from)
        self.idle_from = max(self.now, self.idle_from) + 700e-6
        self.most_ahead_s = max(self.most_ahead_s, self.idle_from - self.now)

    def event(self, *, blocking: bool) -> Any:
        done: list[float] = []

        def synchronize() -> None:
            self.now = max(self.now, done[0])

        return types.SimpleNamespace(record=lambda: done.append(self.idle_from), synchronize=synchronize)


def test_a_busy_gpu_never_waits_for_its_host_and_is_free_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = PretendedGpu(monkeypatch)
    jitter.keep_busy(0.03)
    assert gpu.left_idle_s <= 60e-6  # until the first piece
    assert gpu.most_ahead_s < 0.003
    assert 0.03 <= gpu.now < 0.033 and gpu.now >= gpu.idle_from


def test_a_way_to_be_disturbed_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError):
        Jitter(CPU)("elsewhere", 1.0)


SLOTS = [(torch.empty(37, 53, dtype=torch.bfloat16), 3, [torch.empty(5), torch.empty(0, 8)]), (torch.empty(1), None, [torch.empty(7, 2).T])]
PARAMETERS = ("tensor", "number", "parts")


def test_every_tensor_has_a_guard_band_on_both_sides() -> None:
    layout, end = place_slots(map(describe, SLOTS))
    extents = [extent(placed) for description in layout for placed in tensor_descriptions(description)]
    begins, ends = zip(*extents, strict=True)
    assert begins[0] >= GUARD_BYTES and all(begin % 256 == 0 for begin in begins)
    assert all(begin - before >= GUARD_BYTES for before, begin in zip(ends, (*begins[1:], end), strict=True))


@pytest.fixture
def guarded() -> tuple[torch.Tensor, GuardBands, list[Region]]:
    layout, end = place_slots(map(describe, SLOTS))
    data = torch.zeros(end + 10_000, dtype=torch.uint8)
    regions = list(argument_regions(layout, PARAMETERS))
    bands = GuardBands(data, regions, Draw(secret=os.urandom(8).hex(), case_key="test", slot=0, block=0, rank=0))
    bands.paint()
    return data, bands, regions


def test_writing_into_arguments_is_not_out_of_bounds(guarded: tuple[torch.Tensor, GuardBands, list[Region]]) -> None:
    data, bands, regions = guarded
    for region in regions:
        data[region.begin : region.end].fill_(POISON)
    assert bands.out_of_bounds() is None
    assert [(region.slot, region.name) for region in regions] == [
        (0, "argument tensor"),
        (0, "argument parts"),
        (0, "argument parts"),
        (1, "argument tensor"),
        (1, "argument parts"),
    ]


@pytest.mark.parametrize("distance", [0, 1, GUARD_BYTES - 1])
@pytest.mark.parametrize("number", range(5))
def test_a_byte_behind_an_argument_is_found(number: int, distance: int, guarded: tuple[torch.Tensor, GuardBands, list[Region]]) -> None:
    data, bands, regions = guarded
    data[regions[number].end + distance] ^= 1
    found = bands.out_of_bounds()
    assert found is not None
    region, where = found
    assert region.end + where == regions[number].end + distance
    assert region is regions[number] or regions[number].begin == regions[number].end  # an empty one has no end of its own
    bands.paint()
    assert bands.out_of_bounds() is None


def test_a_byte_before_the_first_argument_is_found(guarded: tuple[torch.Tensor, GuardBands, list[Region]]) -> None:
    data, bands, regions = guarded
    data[regions[0].begin - 3] ^= 0xFF
    assert bands.out_of_bounds() == (regions[0], -3)


@given(st.integers(0, 1))
def test_poisoning_a_slot_changes_its_tensors_and_no_other_byte(slot: int) -> None:
    layout, end = place_slots(map(describe, SLOTS))
    data = torch.zeros(end, dtype=torch.uint8)
    slots = ArgumentSlots(data, layout, str)
    slots.poison(slot)
    assert all(bool(tensor.isnan().all()) for tensor in slots.tensors[slot])
    assert not any(bool(tensor.any()) for tensor in slots.tensors[1 - slot])
    assert int((data == POISON).sum()) == sum(tensor.nbytes for tensor in slots.tensors[slot])
    assert set(data.tolist()) == {0, POISON}


def test_an_arena_that_is_cleared_shows_nothing_of_what_was_in_it() -> None:
    file = memory_file("test")
    try:
        mine = Arena.create(10_000, CPU, file)
        mine.data.fill_(7)
        mine.clear()
        theirs = Arena.attach(mine.handle, CPU, file)
        assert not theirs.data.any() and not mine.data.any()
        mine.data[5] = 1
        assert int(theirs.data[5]) == 1
    finally:
        os.close(file)


def test_before_a_block_every_gpu_in_use_is_waited_for_and_no_l2_cache_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, ...]] = []
    runtime = types.SimpleNamespace(
        cudaLimit=types.SimpleNamespace(cudaLimitPersistingL2CacheSize="persisting"),
        cudaCtxResetPersistingL2Cache=lambda: log.append(("reset",)),
        cudaDeviceSetLimit=lambda *limit: log.append(limit),
    )
    monkeypatch.setattr(cache_flush, "runtime", lambda: runtime)
    monkeypatch.setattr(cache_flush, "_synchronize", lambda *device: log.append(("wait", *device)))
    monkeypatch.setattr(cache_flush, "_count", lambda: 4)
    monkeypatch.setattr(cache_flush, "_in_use", lambda device: device in (0, 3))
    cache_flush.bind.cache_clear()
    try:
        cache_flush.quiesce()
    finally:
        cache_flush.bind.cache_clear()
    assert log == [("wait",), ("wait", 0), ("wait", 3), ("reset",), ("persisting", 0)]


def test_ranks_hold_sms_with_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile nothing: in a sandbox there is no cache to find it in."""
    held = []
    monkeypatch.setattr(jitter, "_sm_holder", lambda device, code: lambda us: held.append((device, code, us)))
    rank = candidate.CandidateRank({"world_size": 1, "device": "cpu"}, 0, -1)
    rank.load_sm_holder(base64.b64encode(b"\x7fELF").decode())
    rank._jitter("hold_sms", 5.0)
    assert held == [(CPU, b"\x7fELF", 5.0)]


@pytest.mark.parametrize(("kept", "into_inputs", "seen"), [(False, False, 7), (True, False, 7), (False, True, 101), (True, True, 7)])
def test_what_a_call_returned_lasts_until_a_late_rank_calls_again(
    monkeypatch: pytest.MonkeyPatch, kept: bool, into_inputs: bool, seen: int
) -> None:
    """A peer that is in its next call already writes to it. Inputs that were overwritten behind their call are not copied again."""
    rank = candidate.CandidateRank({"world_size": 1, "device": "cpu"}, 0, memory_file("test"))
    layout, size = place_slots([describe((torch.empty(1, dtype=torch.int64),))] * 3)
    regions, room = place_slots([describe(torch.empty(1, dtype=torch.int64))] * 3)
    arena = torch.zeros(size, dtype=torch.uint8)
    arguments = ArgumentSlots(arena, layout, lambda name: None)
    outputs = OutputRegions(torch.zeros(room, dtype=torch.uint8), regions, CPU)
    results: list[torch.Tensor] = []

    def solution(tensor: torch.Tensor) -> torch.Tensor:
        results.append(tensor if into_inputs else torch.empty_like(tensor))
        return results[-1].fill_(100 + len(results) - 1)

    class Attached(candidate.AttachedCase):
        def __init__(self) -> None:
            super().__init__(types.SimpleNamespace(data=arena), arguments, outputs)  # type: ignore[arg-type]

    monkeypatch.setattr(rank, "_spaces", {"check": Attached()})
    monkeypatch.setattr(rank, "_solution", solution)
    monkeypatch.setattr(rank, "_jitter", lambda way, us: [result.fill_(7) for result in results[-1:]])
    rank.call_under_stress("check", [0, 1, 2], [(2, "host", 10.0)], [], [1] * kept, ())
    assert [int(views[0]) for views in outputs.views] == [100, seen, 102]
