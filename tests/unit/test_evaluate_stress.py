"""What stress is made of, without ranks: its size, its jitter, guard bands, spoilt inputs, and blocks in any order."""

from __future__ import annotations

import math
import os
import time
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerlane import problems
from peerlane.evaluate import quiet, timing
from peerlane.evaluate.arena import GUARD_BYTES, POISON, Arena, extent, memory_file
from peerlane.evaluate.guards import GuardBands, Region, argument_regions
from peerlane.evaluate.jitter import Jitter
from peerlane.evaluate.slots import FRONT_BYTES, ArgumentSlots, OutputRegions, Unowned, contiguous_layout, place_all
from peerlane.evaluate.stress import Stress, choose_compared, choose_slots, draw_jitter
from peerlane.evaluate.trial import Rejected, Trial
from peerlane.evaluate.verdict import Unstable, WrongResult
from peerlane.problems._draw import Draw
from peerlane.problems._tree import describe, tensor_descriptions
from peerlane.settings import Deadlines, StressRules

RULES = StressRules()
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("call_s", "judge_s", "slot_bytes", "slots"),
    [
        (1e-5, 1e-4, 1e3, RULES.max_slots),
        (RULES.budget_s / 200, RULES.budget_s / 200, 1e3, 25),  # a quarter of the time for one pass
        (10.0, 10.0, 1e3, RULES.min_slots),
        (1e-5, 1e-4, RULES.max_bytes / 12, 12),
        (10.0, 10.0, RULES.max_bytes / 5, 5),
        (1e-5, 1e-4, 1e12, RULES.fewest_slots),
        (0.0, 0.0, 0.0, RULES.max_slots),
    ],
)
def test_a_pass_is_as_long_as_time_and_memory_allow(call_s: float, judge_s: float, slot_bytes: float, slots: int) -> None:
    assert choose_slots(call_s, judge_s, slot_bytes, RULES) == slots


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
        (RULES.min_calls, 1, -RULES.overtime_s / 2, True),  # and a late one, if it can be had in time
        (RULES.calls, 1, 10.0, True),
        (RULES.min_calls, 1, -RULES.overtime_s * 2, False),
        (RULES.min_calls - 1, 2, -RULES.overtime_s / 2, True),
        (RULES.min_calls - 1, 2, -RULES.overtime_s * 2, False),
        (RULES.min_calls, 2, -0.1, False),
        (RULES.calls - 1, 2, 10.0, True),
        (RULES.calls, 2, 10.0, False),
    ],
)
def test_passes_end_with_the_calls_or_the_time(calls: int, passes: int, seconds_left: float, goes_on: bool) -> None:
    stress = Stress(None, RULES)  # type: ignore[arg-type]
    assert stress._goes_on(calls, passes, time.monotonic() + seconds_left) == goes_on


class ScriptedRanks:
    """Stands for a group: gives the answers of a script to the requests that it has answers for, and nods to all others."""

    def __init__(self, **answers: list[dict[str, Any]]) -> None:
        self.answers = answers

    def ask(self, request: dict[str, Any], phase: str, deadline_s: float) -> list[dict[str, Any]]:
        return self.answers.get(request["op"], [{}, {}])


UNTOUCHED = {"changed": None, "trespass": None}
BEHIND = {"slot": 3, "name": "argument tensor", "place": "0 bytes behind its end"}


def looked_again(*answers: dict[str, Any]) -> None:
    session = types.SimpleNamespace(trusted=ScriptedRanks(recall=list(answers)), deadlines=Deadlines())
    problem = problems.get(1)
    trial = Trial(session, ScriptedRanks(), problem, problem.cases("small", 2)[0], "check", 4)  # type: ignore[arg-type]
    trial.look_again(2, "stress")


def test_what_is_as_it_was_passes_the_second_look() -> None:
    looked_again(UNTOUCHED, UNTOUCHED)


def test_a_result_that_changed_after_its_end_is_unstable() -> None:
    with pytest.raises(Rejected) as caught:
        looked_again(UNTOUCHED, {**UNTOUCHED, "changed": 1})
    verdict = caught.value.verdict
    assert isinstance(verdict, Unstable) and (verdict.rank, verdict.output) == (1, "output 1") and "still changing" in verdict.reason


def test_writing_outside_an_argument_is_a_wrong_result_that_names_it() -> None:
    with pytest.raises(Rejected) as caught:
        looked_again({**UNTOUCHED, "trespass": BEHIND}, UNTOUCHED)
    verdict = caught.value.verdict
    assert isinstance(verdict, WrongResult) and (verdict.phase, verdict.rank, verdict.slot) == ("stress", 0, 3)
    assert "argument tensor" in verdict.reason and "0 bytes behind its end" in verdict.reason


def test_one_rank_at_a_time_is_held_up_for_times_of_every_magnitude() -> None:
    calls = 20_000
    plans = draw_jitter(4, calls, RULES, on_gpu=False)
    assert all({way for _, way, _ in plan} == {"host"} for plan in plans)
    positions = [position for plan in plans for position, _, _ in plan]
    assert len(positions) == len(set(positions)) and set(positions) <= set(range(calls))
    assert len(positions) / calls == pytest.approx(RULES.delayed_share, rel=0.1)
    delays_us = [us for plan in plans for _, _, us in plan]
    assert min(delays_us) >= RULES.shortest_delay_us and max(delays_us) <= RULES.longest_delay_us
    for decade in (1, 2, 3):  # as many between 10 and 100 us as between 1 and 10 ms
        share = sum(decade <= math.log10(us) < decade + 1 for us in delays_us) / len(delays_us)
        assert share == pytest.approx(1 / 3, rel=0.15)


def test_on_gpus_streams_wait_too_and_sms_are_held_in_a_part_of_the_passes() -> None:
    passes = [{way for plan in draw_jitter(2, 200, RULES, on_gpu=True) for _, way, _ in plan} for _ in range(100)]
    assert all({"host", "stream"} <= ways <= {"host", "stream", "crowd"} for ways in passes)
    assert 20 <= sum("crowd" in ways for ways in passes) <= 80


def test_a_way_to_be_disturbed_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError):
        Jitter(CPU)("elsewhere", 1.0)


def laid_out(tensors: list[tuple[Any, ...]]) -> tuple[list[dict[str, Any]], int]:
    layout, offset = [], FRONT_BYTES
    for args in tensors:
        placed, offset = place_all(describe(args), offset)
        layout.append(placed)
    return layout, offset


SLOTS = [(torch.empty(37, 53, dtype=torch.bfloat16), 3, [torch.empty(5), torch.empty(0, 8)]), (torch.empty(1), None, [torch.empty(7, 2).T])]
PARAMETERS = ("tensor", "number", "parts")


def test_every_tensor_has_a_guard_band_on_both_sides() -> None:
    layout, end = laid_out(SLOTS)
    extents = [extent(placed) for description in layout for placed in tensor_descriptions(description)]
    begins, ends = zip(*extents, strict=True)
    assert begins[0] >= GUARD_BYTES and all(begin % 256 == 0 for begin in begins)
    assert all(begin - before >= GUARD_BYTES for before, begin in zip(ends, (*begins[1:], end), strict=True))


@pytest.fixture
def guarded() -> tuple[torch.Tensor, GuardBands, list[Region]]:
    layout, end = laid_out(SLOTS)
    data = torch.zeros(end + 10_000, dtype=torch.uint8)
    regions = list(argument_regions(layout, PARAMETERS))
    bands = GuardBands(data, regions, Draw(secret=os.urandom(8).hex(), case_key="test", slot=0, block=0, rank=0))
    bands.paint()
    return data, bands, regions


def test_writing_into_arguments_is_no_trespass(guarded: tuple[torch.Tensor, GuardBands, list[Region]]) -> None:
    data, bands, regions = guarded
    for region in regions:
        data[region.begin : region.end].fill_(POISON)
    assert bands.trespass() is None
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
    found = bands.trespass()
    assert found is not None
    region, where = found
    assert region.end + where == regions[number].end + distance
    assert region is regions[number] or regions[number].begin == regions[number].end  # an empty one has no end of its own
    bands.paint()
    assert bands.trespass() is None


def test_a_byte_before_the_first_argument_is_found(guarded: tuple[torch.Tensor, GuardBands, list[Region]]) -> None:
    data, bands, regions = guarded
    data[regions[0].begin - 3] ^= 0xFF
    assert bands.trespass() == (regions[0], -3)


@given(st.integers(0, 1))
def test_spoiling_a_slot_changes_its_tensors_and_no_other_byte(slot: int) -> None:
    layout, end = laid_out(SLOTS)
    data = torch.zeros(end, dtype=torch.uint8)
    slots = ArgumentSlots(data, layout, str)
    slots.spoil(slot)
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


class Recorder:
    """A solution that writes down which argument it got, and returns its storage, another one every time."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.returned: list[torch.Tensor] = []

    def __call__(self, number: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(number))
        self.returned.append(number + 100)
        return self.returned[-1]


@pytest.fixture
def clockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks without a GPU: events are numbers, and their differences the times."""
    for name, stand_in in {
        "_timer": lambda **_: object(),
        "_record": lambda event: None,
        "_elapsed": lambda start, end: 0.001,
        "_current_stream": lambda: None,
        "_synchronize": lambda: None,
        "_all_reduce": lambda tensor: None,
        "quiesce": lambda: None,
        "evict": lambda: None,
        "synchronize_all": lambda: None,
    }.items():
        monkeypatch.setattr(timing, name, stand_in)


@pytest.mark.usefixtures("clockless")
def test_a_block_calls_its_slots_in_the_order_that_was_asked_for_and_keeps_the_last_result() -> None:
    solution, slots = Recorder(), 5
    args = [(torch.tensor([slot]),) for slot in range(slots)]
    layout, size = contiguous_layout(iter([torch.empty(1, dtype=torch.int64)] * slots))
    outputs = OutputRegions(torch.zeros(size, dtype=torch.uint8), layout, CPU)
    block = timing.make_block("eager", solution, args, outputs, CPU)
    assert len(block.run(None, [3, 1, 4, 0, 2])["iterations_us"]) == slots
    assert solution.seen == [3, 1, 4, 0, 2]
    assert [int(views[0]) for views in outputs.views] == [100, 101, 102, 103, 104]
    solution.returned[-1].fill_(7)
    outputs.copy(2, block.latest())
    assert int(outputs.views[2][0]) == 7, "a result that changes after its end must be seen when it is copied again"


@pytest.mark.usefixtures("clockless")
def test_graphs_are_replayed_in_the_order_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [torch.tensor([slot]) for slot in range(4)]

    def capture(self: timing.GraphBlock) -> list[int]:
        self._returned = [[Unowned(tensor)] for tensor in results]
        return list(range(4))

    replayed: list[int] = []
    monkeypatch.setattr(timing.GraphBlock, "_capture", capture)
    monkeypatch.setattr(timing, "_replay", replayed.append)
    monkeypatch.setattr(timing, "_sleep", lambda cycles: None)
    outputs = OutputRegions(torch.zeros(1, dtype=torch.uint8), [], CPU)
    block = timing.make_block("graph", lambda: None, [()] * 4, outputs, CPU)
    block.run(None, [2, 0, 3, 1])
    assert replayed == [2, 0, 3, 1]
    assert block.latest()[0] is results[1]


def test_before_a_block_every_gpu_in_use_is_waited_for_and_no_l2_cache_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, ...]] = []
    runtime = types.SimpleNamespace(
        cudaLimit=types.SimpleNamespace(cudaLimitPersistingL2CacheSize="persisting"),
        cudaCtxResetPersistingL2Cache=lambda: log.append(("reset",)),
        cudaDeviceSetLimit=lambda *limit: log.append(limit),
    )
    monkeypatch.setattr(quiet, "runtime", lambda: runtime)
    monkeypatch.setattr(quiet, "_synchronize", lambda *device: log.append(("wait", *device)))
    monkeypatch.setattr(quiet, "_count", lambda: 4)
    monkeypatch.setattr(quiet, "_in_use", lambda device: device in (0, 3))
    quiet.bind.cache_clear()
    try:
        quiet.quiesce()
    finally:
        quiet.bind.cache_clear()
    assert log == [("wait",), ("wait", 0), ("wait", 3), ("reset",), ("persisting", 0)]
