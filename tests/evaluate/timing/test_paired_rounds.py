"""The timing protocol on scripted blocks and a simulated clock."""

from __future__ import annotations

import math
import random
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from peerlane import problems
from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import Rejected
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.timing import paired_rounds
from peerlane.evaluate.timing.back_to_back import input_groups
from peerlane.evaluate.timing.benchmark import Benchmark, Unmeasurable, slots_to_time
from peerlane.evaluate.timing.paired_rounds import draw_compared, draw_plan
from peerlane.evaluate.timing.scoring import BlockTimes, Rounds, choose_calls
from peerlane.settings import Deadlines, Protocol, TimingRules
from sample_results import wrong_result

HAND_OFF_US = 300.0
WRONG = wrong_result(phase="timing")


@dataclass
class World:
    """Two sides whose calls take what the script says; time passes by blocks only. Stands for a trial and its ranks."""

    reference_us: float = 100.0
    first_us: float = 0.0
    candidate_us: float = 100.0
    events_share: float = 1.0
    """of the candidate's block, that its events tell"""
    candidate_behind_us: float = 0.0
    """work of the candidate behind the last event, per block"""
    beside: float = 1.0
    """how much slower the reference is once the candidate is there"""
    noise: float = 0.01
    wrong: BaseException | None = None
    """raised where the candidate's graph runs"""
    loaded: bool = False
    now_s: float = 0.0
    slots: int = 128
    judge_s: float = 0.0
    samples_ranks: bool = False
    slot_bytes: float = 1.0
    collected: list[int] = field(default_factory=list)
    deadlines: list[tuple[int, float]] = field(default_factory=list)
    """of the blocks of the candidate's ranks: their calls, and how long they may take"""
    mode: str = "eager"
    plan: wire.BlockPlan = field(default_factory=lambda: wire.BlockPlan(0, ()))
    side: str = ""
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    problem = problems.get(1)
    case = problem.cases("small", 2)[0]
    session = types.SimpleNamespace(deadlines=Deadlines(), suspect_trusted=lambda: None, place=types.SimpleNamespace(shares_gpus=False))

    def deadline(self, seconds: float, calls: int = 1) -> float:
        return max(seconds, calls * self.reference_us * 50e-6)

    @property
    def alike(self) -> list[int]:
        return [0] * self.slots

    @property
    def quickest_s(self) -> float:
        return self.reference_us / 1e6

    @property
    def reference_s(self) -> float:
        return self.first_us / 1e6 or self.quickest_s

    @property
    def trusted(self) -> TrustedSide:
        return TrustedSide(self)

    @property
    def candidate(self) -> CandidateSide:
        return CandidateSide(self)

    def block(self, call_us: float, share: float = 1.0, behind_us: float = 0.0) -> list[wire.BlockRun]:
        us = call_us * self.plan.calls * self.dice.lognormvariate(0.0, self.noise) + 40.0
        self.now_s += (us + behind_us + HAND_OFF_US * self.dice.uniform(0.8, 1.0)) * 1e-6
        return [wire.BlockRun(us * share * 0.9, 0.0, 1), wire.BlockRun(us * share, 0.0, 1)]

    def prepare_block(self, mode: str, side: str, plan: wire.BlockPlan) -> tuple[list[str | None], list[str | None]]:
        self.mode, self.plan, self.side = mode, plan, side
        return [None], [None]

    def collect_from(self, answers: Any, chosen: list[int], phase: str, swaps: Any = None, intact: Any = None) -> int:
        assert all(0 <= slot < self.plan.calls for slot in chosen)
        self.collected += chosen
        return 0

    def nothing(self, *_: Any, **__: Any) -> None: ...

    open = refresh_inputs = generate_inputs = publish_inputs = discard = judge = count_collectives = recheck_output = nothing


@dataclass
class Side:
    """The ranks of one side, which do nothing but run blocks."""

    world: World

    def nothing(self, *_: Any, **__: Any) -> None: ...

    warm_up_block = ready_block = undo_swaps = call = nothing


class TrustedSide(Side):
    def prepare_block(self, mode: str, plan: wire.BlockPlan) -> list[str | None]:
        self.world.mode, self.world.plan = mode, plan
        return [None]

    def time_copies(self) -> list[wire.CopiesTime]:
        return [wire.CopiesTime(40.0, 20.0)]

    def run_block(self) -> list[wire.BlockRun]:
        return self.world.block(self.world.reference_us * (self.world.beside if self.world.loaded else 1.0))


class CandidateSide(Side):
    def describe_outputs(self, slots: int) -> list[wire.Outputs]:
        return [[{}] * slots] * 2

    def run_block(self, deadline_s: float) -> list[wire.BlockRun]:
        world = self.world
        world.deadlines.append((world.plan.calls, deadline_s))
        if world.wrong is not None and world.loaded and world.mode == "graph":
            raise world.wrong
        if world.side == "reference":
            return world.block(world.reference_us)
        return world.block(world.candidate_us, world.events_share, world.candidate_behind_us)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    worlds: list[World] = []
    tick = lambda: worlds[-1].now_s  # noqa: E731
    monkeypatch.setattr(paired_rounds.time, "perf_counter", tick)
    monkeypatch.setattr(paired_rounds.time, "monotonic", tick)
    return worlds


def measure(
    worlds: list[World],
    mode: str = "graph",
    rules: TimingRules | None = None,
    *,
    end_s: float = math.inf,
    protocol: Protocol = "peerlane",
    **script: Any,
) -> Any:
    world = World(**script)
    worlds.append(world)
    benchmark = Benchmark(world, (mode,), rules or TimingRules(), None, (), 80e9, end_s, protocol)  # type: ignore[arg-type]
    benchmark.baseline()
    world.loaded = True
    benchmark.measure(mode)  # type: ignore[arg-type]
    return benchmark.record(mode)  # type: ignore[arg-type]


def test_blocks_of_a_slow_reference_may_take_long(clock: list[World]) -> None:
    """A candidate as slow as the reference returns, however late."""
    measure(clock, "eager", reference_us=20e6, candidate_us=20e6)
    assert clock[-1].deadlines and all(limit_s == calls * 1000.0 for calls, limit_s in clock[-1].deadlines)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_reference_against_itself_is_as_fast_and_a_candidate_of_half_the_time_is_twice_as_fast(mode: str, clock: list[World]) -> None:
    same = measure(clock, mode)
    assert same.speedup.median == pytest.approx(1.0, abs=0.02) and not same.faster and same.flags == ()
    twice = measure(clock, mode, candidate_us=50.0)
    assert twice.speedup.median == pytest.approx(2.0, rel=0.04) and twice.faster
    assert twice.reference_us.median / twice.candidate_us.median == pytest.approx(twice.speedup.median)
    assert clock[-1].collected, "outputs are compared"


def test_the_public_protocol_times_a_hundred_calls_behind_their_warm_up(clock: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """And subtracts nothing, for there are no copies; nothing is compared."""
    warmed: list[str] = []
    monkeypatch.delattr(paired_rounds, "_WARM_ROUNDS")  # blocks warm themselves up
    for side in (TrustedSide, CandidateSide):
        monkeypatch.setattr(side, "warm_up_block", lambda self, *_: warmed.append(type(self).__name__))
    speed = measure(clock, "eager", candidate_us=50.0, first_us=100_000.0, protocol="kittens", slots=3)
    assert speed.calls_per_block == 100 and clock[-1].plan == wire.BlockPlan(100, (), 500)
    assert speed.copies_us == 0.0 and clock[-1].collected == []
    assert speed.candidate_us.median == pytest.approx(50.4, rel=0.05) and speed.speedup.median == pytest.approx(2.0, rel=0.04)
    assert warmed.count("CandidateSide") >= speed.rounds <= warmed.count("TrustedSide"), "before each block"


def test_the_public_protocol_has_no_graphs_and_leaves_slow_references_out(clock: list[World]) -> None:
    with pytest.raises(Unmeasurable, match="no graphs"):
        measure(clock, protocol="kittens")
    with pytest.raises(Unmeasurable, match="600 calls of the reference would take 60 s"):
        measure(clock, "eager", protocol="kittens", reference_us=100_000.0)
    assert clock[-1].now_s == 0.0


def test_groups_of_inputs_do_not_fit_into_the_cache_together() -> None:
    assert input_groups(30 * 2**20, 60.0) == 3 and input_groups(31 * 2**20, 60.0) == input_groups(1e9, 60.0) == 2
    assert input_groups(8.0, 60.0) == 128 and input_groups(50 * 2**20, None) == 3


def test_all_that_timing_collected_is_judged(clock: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its last outputs are looked at again."""
    judged: list[tuple[str, int]] = []
    again: list[tuple[int, str]] = []
    monkeypatch.setattr(World, "judge", lambda world, phase: judged.append((phase, len(world.collected))))
    monkeypatch.setattr(World, "recheck_output", lambda world, slot, phase, ended: again.append((slot, phase)))
    speed = measure(clock, "eager")
    assert judged[-1] == ("timing", len(clock[-1].collected)), "nothing was collected behind the last judgement"
    assert again and set(again) == {(speed.calls_per_block - 1, "timing")}


def test_both_sides_are_first_in_some_rounds(clock: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes second may find a warmer clock, or a warmer device."""
    blocks: list[str] = []
    first: Counter[str] = Counter()
    for side in (TrustedSide, CandidateSide):
        run = side.run_block
        monkeypatch.setattr(side, "run_block", lambda self, *args, run=run: (blocks.append(type(self).__name__), run(self, *args))[1])
    play = paired_rounds.PairedRounds._round

    def one_round(rounds: paired_rounds.PairedRounds, *, compared: bool) -> Any:
        blocks.clear()
        times = play(rounds, compared=compared)
        assert sorted(blocks) == ["CandidateSide", "TrustedSide"]
        first[blocks[0]] += 1
        return times

    monkeypatch.setattr(paired_rounds.PairedRounds, "_round", one_round)
    for _ in range(4):
        measure(clock, "eager")
    assert min(first["TrustedSide"], first["CandidateSide"]) > first.total() / 5


def test_forged_events_win_nothing_and_gross_ones_are_a_failure_of_integrity(clock: list[World]) -> None:
    forged = measure(clock, events_share=0.6)
    assert forged.speedup.median == pytest.approx(1.0, abs=0.08)
    with pytest.raises(Rejected) as rejected:
        measure(clock, events_share=0.05)
    assert rejected.value.verdict.kind == "integrity_failure"


def test_work_behind_the_last_event_counts(clock: list[World]) -> None:
    assert measure(clock, candidate_us=50.0, candidate_behind_us=1_000.0).speedup.median == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("mode", "seen"), [("eager", 1.5), ("graph", 1.0)])
def test_a_candidate_that_slows_the_reference_down_is_flagged_and_not_faster(mode: str, seen: float, clock: list[World]) -> None:
    speed = measure(clock, mode, beside=1.5)
    assert speed.speedup.median == pytest.approx(seen, abs=0.03) and speed.flags == ("slower_reference",) and not speed.faster
    assert speed.reference_slowdown == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(("shares_gpus", "speedup"), [(True, 2.0), (False, 1.8)])
def test_the_group_offset_corrects_speeds_of_virtual_nodes(shares_gpus: bool, speedup: float) -> None:
    runner: Any = types.SimpleNamespace(session=types.SimpleNamespace(place=types.SimpleNamespace(shares_gpus=shares_gpus)))
    benchmark = Benchmark(runner, ("graph",), TimingRules(), None, (), 0.0)

    def rounds(reference_us: float, other_us: float) -> paired_rounds.PairedRounds:
        made = paired_rounds.PairedRounds(runner=runner, mode="graph", side="candidate", rules=benchmark.rules, calls=1)
        made.references, made.others = ([BlockTimes(us, us)] * 9 for us in (reference_us, other_us))
        return made

    benchmark.baselines["graph"], benchmark.measured["graph"] = rounds(900.0, 1000.0), rounds(900.0, 500.0)
    found = benchmark.record("graph")
    assert found.speedup.median == pytest.approx(speedup) and found.group_offset == pytest.approx(0.9)
    assert found.group_offset_applied is shares_gpus
    assert found.faster and found.noise_floor == pytest.approx(0.015 if shares_gpus else 0.1)


def test_timing_ends_when_it_knows_enough_with_its_budget_or_when_that_cannot_do(clock: list[World]) -> None:
    def blocks_s(speed: Any) -> float:
        return float(sum(speed.candidate_clock_us + speed.reference_clock_us) * 1e-6)

    rules = TimingRules(budget_s=0.1)
    assert measure(clock, noise=0.002).rounds <= 12
    assert rules.budget_s * 0.9 <= blocks_s(measure(clock, rules=rules, noise=0.6)) <= rules.budget_s * 1.3
    hopeless = measure(clock, noise=0.6)
    assert hopeless.rounds <= 45 and blocks_s(hopeless) < TimingRules().budget_s / 2


def test_calls_that_take_long_are_few_and_keep_to_the_budget(clock: list[World]) -> None:
    speed = measure(clock, reference_us=500_000.0, candidate_us=250_000.0)
    assert speed.calls_per_block == 2 and speed.rounds == paired_rounds._MIN_ROUNDS
    assert speed.speedup.median == pytest.approx(2.0, rel=0.04)
    assert clock[-1].now_s < 30, "probe, baseline and rounds"


def test_every_rank_has_its_turn_in_three_rounds(clock: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "case", World.problem.cases("small", 4)[0])
    slow = {"reference_us": 500_000.0, "candidate_us": 250_000.0, "judge_s": 5.0}
    assert measure(clock, end_s=0.0, samples_ranks=True, **slow).rounds == 3 and len(clock[-1].collected) == 4
    assert len(measure(clock, end_s=0.0, **slow) and clock[-1].collected) <= 3, "on all ranks"


def test_timing_that_begins_late_has_few_rounds_and_says_so(clock: list[World]) -> None:
    slow = {"reference_us": 500_000.0, "candidate_us": 250_000.0}
    late = measure(clock, end_s=0.0, **slow)
    assert late.rounds == paired_rounds._MIN_LATE_ROUNDS["candidate"] and late.flags == ("few_rounds",)
    assert late.speedup.n == late.rounds and clock[-1].now_s < 11, "probe, two rounds of the baseline, and three"
    assert measure(clock, end_s=1e9, **slow).flags == ()


def test_of_large_slots_one_a_round_waits_to_be_judged(clock: list[World]) -> None:
    speed = measure(clock, slot_bytes=3e9)
    assert len(clock[-1].collected) <= speed.rounds < len(measure(clock) and clock[-1].collected)


def test_slow_references_get_few_slots() -> None:
    assert slots_to_time(30e-6, TimingRules()) == 128
    assert slots_to_time(1e-3, TimingRules()) == 20
    assert slots_to_time(0.5, TimingRules()) == 8


@pytest.mark.parametrize("failure", [GroupFailure("hang", "timing", "no answer", ranks=[1], deadline_s=30.0), Rejected(WRONG)])
def test_what_goes_wrong_under_replay_fails_the_mode_with_evidence(failure: BaseException, clock: list[World]) -> None:
    with pytest.raises(Unmeasurable) as found:
        measure(clock, wrong=failure)
    assert found.value.kind in ("hang", "wrong_result") and "rank" in str(found.value)
    assert measure(clock, "eager", wrong=failure).speedup.median == pytest.approx(1.0, abs=0.03)


def test_a_plan_swaps_before_calls_and_names_nothing_that_will_be_compared() -> None:
    for _ in range(50):
        plan = draw_plan(12, [0] * 20, 2)
        assert 1 <= len(plan.swaps) <= 2
        assert all(0 < position < other < 12 for position, _, other in plan.swaps)
    assert draw_plan(4, [-1] * 4, 2).swaps == (), "contents that are too large stay"


def test_any_output_of_a_block_may_be_compared_behind_it() -> None:
    plan, counts = draw_plan(128, [0] * 128, 2), Counter[int]()
    known = {127, *(slot for _, *pair in plan.swaps for slot in pair)}
    for _ in range(500):
        drawn = draw_compared(plan)
        assert known < set(drawn) and len(drawn) == 2 * len(known)
        counts.update(drawn)
    assert len(counts) == 128, "each call of the block"
    assert draw_compared(draw_plan(4, [-1] * 4, 2)) in ([0, 3], [1, 3], [2, 3])


def test_where_the_device_waits_for_the_host_copies_are_not_taken_off_in_full() -> None:
    def counted_us(events_us: float, launch_us: float) -> float:
        block = BlockTimes(events_us, events_us, launch_us)
        rounds = Rounds(calls=10, copies_us=200.0, copies_launch_us=30.0, references=[block])
        return rounds.counted_us([block])[0]

    assert counted_us(1000.0, 500.0) == pytest.approx(80.0), "the device was busy: copies took 200 us of it"
    assert counted_us(1000.0, 990.0) == pytest.approx(96.0), "the host launched until the end: copies took 30 us of that"
    assert counted_us(1000.0, 5000.0) == pytest.approx(100.0), "no more than the block took"
    assert counted_us(1000.0, 0.0) == pytest.approx(80.0), "a rank that claims less gains nothing on top"


def test_the_hand_off_of_the_reference_is_taken_off_both_sides() -> None:
    rounds = Rounds(calls=10, references=[BlockTimes(1000.0, 1200.0)] * 10, others=[BlockTimes(100.0, 1200.0)] * 10)
    assert rounds.counted_us(rounds.others) == pytest.approx([100.0] * 10)
    assert rounds.ratio().median == pytest.approx(1.0)


def test_the_slowest_rank_counts() -> None:
    assert BlockTimes.of([wire.BlockRun(1.0, 7.0, 0), wire.BlockRun(3.0, 5.0, 0)], 10.0) == BlockTimes(3.0, 10.0, 7.0)


def test_calls_per_block() -> None:
    assert choose_calls(20.0, 2000.0, 128, 4) == 100
    assert choose_calls(1.0, 2000.0, 128, 4) == 128
    assert choose_calls(90_000.0, 2000.0, 128, 4) == 4
