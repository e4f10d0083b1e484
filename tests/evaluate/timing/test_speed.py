"""The timing protocol without GPUs: rounds, clocks and captures on ranks that answer what a script says."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.errors import HarnessError
from peerlane.evaluate.correctness.case_runner import Rejected
from peerlane.evaluate.correctness.slot_swaps import SlotSwaps
from peerlane.evaluate.memory.slots import OutputRegions
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.ranks import timed_block
from peerlane.evaluate.results.record import Mode
from peerlane.evaluate.results.speed_record import ModeSpeed
from peerlane.evaluate.timing import speed
from peerlane.evaluate.timing.benchmark import Benchmark, Unmeasurable
from peerlane.evaluate.timing.block_times import BlockTimes, locked_excess
from peerlane.evaluate.timing.gaps import Gaps, charged, device_gap_us, usual_gaps
from peerlane.evaluate.timing.scoring import Rounds
from peerlane.evaluate.timing.speed import CaptureFailed, Disturbed, Race
from peerlane.evaluate.timing.turnstile import NOTHING_LOCKED, LockedCalls, Passage
from peerlane.hardware.profiles import H200_SXM
from peerlane.problems.contract import Cost
from peerlane.settings import Deadlines, TimingRules

SLOTS = 8
RANKS = 2
MIN_ROUNDS = 9


def rounds(count: int) -> dict[str, int]:
    """In both launch modes."""
    return {"eager": count, "graph": count}


RULES = TimingRules(warm_calls=SLOTS, min_rounds=rounds(MIN_ROUNDS), max_rounds=12, judging_s=0.4)


class Clock:
    """Time passes only where a test says so, and a microsecond whenever somebody looks: a busy machine changes nothing."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=CLOCK))


@dataclass
class FakeSession:
    deadlines: Deadlines = field(default_factory=Deadlines)
    full_pace_us: float = 0.0
    coming_up: int = 0
    """how many times something was"""

    def wait_for_starts(self) -> bool:
        self.coming_up -= 1
        return self.coming_up >= 0


@dataclass
class FakeProblem:
    changeable: frozenset[str] = frozenset()
    modes: tuple[str, ...] = ("eager", "graph")


@dataclass
class FakeRunner:
    """Stands for a Trial: writes down what is asked, answers with blocks of given times (us): one for all calls, or one each."""

    trusted_us: Iterator[float | list[float]]
    other_us: Iterator[float | list[float]]
    problem: FakeProblem = field(default_factory=FakeProblem)
    session: FakeSession = field(default_factory=FakeSession)
    slots: int = SLOTS
    captured: bool = True
    span_us: float | None = None
    gaps_us: list[float] | None = None
    """behind the other side's calls"""
    host_gap_us: float = 0.0
    judge_s: float = 0.0
    trusted_hand_off_s: float = 0.0
    other_hand_off_s: float = 0.0
    true_us: tuple[float, float] = (0.0, 0.0)
    """of a call, by the outer clock: the reference's and the other side's"""
    latency_us: float = 20.0
    prepare_s: float = 0.0
    """of the trusted ranks; and how much longer the others need"""
    other_prepare_s: float = 0.0
    cores: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    parts: set[tuple[bool, int]] = field(default_factory=set)
    """how many there were in timed and other blocks"""
    orders: dict[str, list[list[int]]] = field(default_factory=lambda: {"trusted": [], "other": []})
    log: list[str] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    collected: list[list[int]] = field(default_factory=list)
    exchanged: list[SlotSwaps] = field(default_factory=list)
    trusted_steps: list[Any] = field(default_factory=list)
    locks: bool = False
    """some calls, as trials do"""
    locked_us: float | None = None
    """of the other side's locked calls, where they take another time"""
    trusted_locked_us: float | None = None
    outer_us: float | None = None
    """of the other side's locked calls, by the outer clock, whatever is said of them"""
    locked_excess_us: tuple[float, float] = (25.0, 25.0)
    locked: list[LockedCalls] = field(default_factory=list)
    trusted_locked: list[LockedCalls] = field(default_factory=list)
    published_locked: LockedCalls = NOTHING_LOCKED
    tickets: int = 0
    output_tensors: int = 1
    group: None = None
    layouts: list[None] = field(default_factory=lambda: [None] * RANKS)
    counted: int = 0
    generated: int = 0
    published: int = 0

    def _block(
        self, side: str, times: Iterator[float | list[float]], hand_off_s: float, order: list[int], timed: bool = True
    ) -> list[dict[str, Any]]:
        passes, odd = divmod(len(order), self.generated)
        assert not odd and all(order.count(slot) == passes for slot in range(self.generated))
        assert (side == "trusted" or self.generated == self.published) and (passes == 1 or not timed)
        self.orders[side].append(order)
        CLOCK.sleep(hand_off_s + len(order) * self.true_us[side != "trusted"] / 1e6)
        if not timed:
            return [{} for _ in range(RANKS)]
        given = next(times)
        calls = given if isinstance(given, list) else [given] * len(order)
        answers = [{"iterations_us": [us - rank for us in calls], "host_gap_us": self.host_gap_us} for rank in range(RANKS)]
        gaps = self.gaps_us if side == "other" and self.gaps_us else [0.0] * len(order)
        for answer in answers:
            span_us = sum(answer["iterations_us"]) + sum(gaps) if any(self.true_us) or sum(gaps) else 1.0
            answer |= {"gaps_us": gaps, "span_us": span_us if self.span_us is None else self.span_us}
        return answers

    def trusted(self, op: str, **more: Any) -> list[dict[str, Any]]:
        if op == "latency":
            return [{"latency_us": self.latency_us}] * RANKS
        self.log.append(f"trusted {op}")
        return [{"captured": True, "took_s": self.prepare_s}] * RANKS

    def trusted_let_through(self, request: dict[str, Any], locked: LockedCalls) -> tuple[list[dict[str, Any]], list[Passage]]:
        self.log.append("trusted block")
        self.trusted_steps.append(request["exchanges"])
        self.trusted_locked.append(locked)
        self.cores.append(("trusted", request["core"]))
        self.parts.add((request["timed"], request["parts"]))
        times = self._block("trusted", self.trusted_us, self.trusted_hand_off_s, request["order"], request["timed"])
        answers = [{**answer, "pace_us": 10.0 + rank} for rank, answer in enumerate(times)]
        self._say(answers, locked, self.trusted_locked_us)
        return answers, self._passages(locked, answers, self.locked_excess_us[0])

    def let_through(
        self, group: Any, requests: list[dict[str, Any]], locked: LockedCalls, phase: str, deadline_s: float
    ) -> tuple[list[dict[str, Any]], list[Passage]]:
        assert len(requests) == RANKS and all(request == requests[0] for request in requests) and phase == "timing"
        request = requests[0]
        assert request["op"] == "block" and (locked == self.published_locked or not request["timed"])
        self.log.append("other block")
        self.cores.append(("other", request["core"]))
        self.parts.add((request["timed"], request["parts"]))
        self.steps.append(request["exchanges"])
        self.locked.append(locked)
        answers = self._block("other", self.other_us, self.other_hand_off_s, request["order"], request["timed"])
        self._say(answers, locked, self.locked_us)
        passages = self._passages(locked, answers, self.locked_excess_us[1])
        if self.outer_us is not None:
            passages = [replace(passage, us=self.outer_us) for passage in passages]
        return answers, passages

    @staticmethod
    def _say(answers: list[dict[str, Any]], locked: LockedCalls, us: float | None) -> None:
        """Has the ranks say that locked calls took another time."""
        for position, _, _ in locked.calls if us is not None else ():
            for rank, answer in enumerate(answers):
                answer["iterations_us"][position] = us - rank

    @staticmethod
    def _passages(locked: LockedCalls, answers: list[dict[str, Any]], excess_us: float) -> list[Passage]:
        places = [(position, slot) for position, slot, _ in locked.calls]
        times = [max(answer["iterations_us"][position] for answer in answers) + excess_us for position, _ in places]
        return [Passage(*place, ((1, 2),) * RANKS, us, (0.0,) * RANKS) for place, us in zip(places, times, strict=True)]

    def hold_to(self, passages: list[Passage], locked: LockedCalls, phase: str) -> None:
        assert [(passage.position, passage.slot) for passage in passages] == [(position, slot) for position, slot, _ in locked.calls]
        self.log += ["hold to"] * bool(passages)

    def lock(self, order: list[int], positions: list[int]) -> LockedCalls:
        chosen = positions if self.locks else []
        self.tickets += len(chosen)
        return LockedCalls.draw(order, chosen, self.tickets, RANKS)

    def ask(self, op: str, phase: str, deadline_s: float, **more: Any) -> list[dict[str, Any]]:
        self.log.append(f"other {op}")
        if op == "profile_block":
            self.steps.append(())
            return self._block("other", self.other_us, self.other_hand_off_s, more["order"])
        return [{"captured": self.captured, "why": "no capture"}] * RANKS

    def discard(self) -> None:
        self.log.append("discard")
        self.collected.clear()

    def generate_inputs(self, *, slots: int | None = None) -> None:
        self.generated = self.slots if slots is None else slots
        self.log.append("generate_inputs")

    def publish_inputs(self, slots: int | None = None, locked: LockedCalls = NOTHING_LOCKED) -> None:
        self.published, self.published_locked = self.slots if slots is None else slots, locked
        self.log.append("publish_inputs")

    def prepare(self, mode: str, side: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        CLOCK.sleep(self.prepare_s + self.other_prepare_s)
        return self.trusted("prepare", mode=mode), self.ask("prepare", "timing", 1.0, mode=mode, side=side)

    def open(self) -> None:
        self.log.append("open")

    def slot_swaps(self, order: list[int], positions: list[int]) -> SlotSwaps:
        return SlotSwaps.draw(order, [0] * self.slots, positions)

    def collect_from(
        self,
        answers: list[dict[str, Any]],
        slots: list[int],
        phase: str,
        slot_swaps: SlotSwaps | None = None,
        intact: list[int] | None = None,
    ) -> int:
        assert len(answers) == RANKS and phase in ("timing", "audit")
        assert intact is None if phase == "audit" else intact is not None and len(intact) == 1 and intact[0] in slots
        assert (slot_swaps is None) == (phase == "audit")
        self.collected.append(slots)
        if slot_swaps is not None:
            self.exchanged.append(slot_swaps)
        self.log.append("collect")
        return 0

    def count_collectives(self, answers: list[dict[str, Any]]) -> None:
        self.counted += 1

    def recheck_output(self, slot: int, phase: str, ended: float) -> None:
        assert (slot, phase) == (self.orders["other"][-1][-1], "timing") and ended <= CLOCK()
        self.log.append("look again")

    def judge(self, phase: str) -> None:
        self.log.append(f"judge {phase}")


REFUSE_FALSE_CLAIMS = Race._refuse_false_claims


@pytest.fixture(autouse=True)
def _without_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take no time here but what a test says."""
    monkeypatch.setattr(Race, "_refuse_false_claims", lambda run: None)


def race(runner: FakeRunner, side: str = "candidate", mode: str = "eager", rules: TimingRules = RULES, **more: Any) -> Race:
    return Race(**{"runner": runner, "mode": mode, "side": side, "rules": rules, "slots": runner.slots, **more})  # type: ignore[arg-type]


def steady(trusted_us: float = 100.0, other_us: float = 50.0, **more: Any) -> FakeRunner:
    return FakeRunner(itertools.repeat(trusted_us), itertools.repeat(other_us), **more)


def measured(speed: Benchmark, mode: Mode) -> ModeSpeed:
    """What is stored of a mode, measured now."""
    speed.measure(mode)
    return speed.record(mode)


def before(mode: str, times: list[float]) -> Rounds:
    """The reference's own rounds, if all its blocks were like this."""
    said = answer(iterations_us=times, gaps_us=[0.0] * SLOTS, span_us=sum(times))
    blocks = [BlockTimes.of([said] * RANKS, SLOTS, 1e6, RULES.usual_shares[mode])] * 20
    return Rounds(mode=mode, side="reference", rules=RULES, references=blocks, others=blocks)


def test_the_ratio_is_that_of_the_slowest_ranks_and_a_narrow_interval_ends_the_race() -> None:
    runner = steady()
    run = race(runner)
    run.run(budget_s=10)
    assert run.score().ratio.median == pytest.approx(2.0)
    assert len(run.others) == len(run.references) == MIN_ROUNDS
    assert run.score().times_us.median == 50.0
    assert run.quantile_us(0.9) == 50.0


def test_collectives_are_counted_once_warm_up_is_over() -> None:
    """A candidate may still set up what belongs to a pointer then; the reference may do what it likes."""
    runner, reference = steady(), steady()
    run = race(runner)
    run.run(budget_s=10)
    race(reference, side="reference").run(budget_s=10)
    assert runner.counted == len(run.others) and reference.counted == 0


def test_a_rehearsal_is_judged_and_not_timed() -> None:
    runner = steady()
    assert len(race(runner, mode="graph").profile_block("marker")) == RANKS
    expected = [
        "generate_inputs",
        "publish_inputs",
        "trusted prepare",
        "other prepare",
        "generate_inputs",
        "publish_inputs",
        "other profile_block",
        "collect",
        "judge audit",
    ]
    assert runner.log == expected and runner.orders["other"][0][-1] in runner.collected[0]


@pytest.mark.parametrize(
    ("others_us", "rounds"),
    [([50.0], MIN_ROUNDS), ([49.0, 50.0, 51.0], RULES.max_rounds), ([40.0, 50.0, 60.0], 2 * RULES.max_rounds)],
)
def test_the_wider_an_interval_the_more_rounds_it_gets(others_us: list[float], rounds: int) -> None:
    run = race(FakeRunner(itertools.repeat(100.0), itertools.cycle(others_us)), mode="graph")
    run.run(budget_s=10)
    assert len(run.others) == rounds


@pytest.mark.parametrize("others_us", [[50.0], [40.0, 50.0, 60.0]])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_baseline_has_as_many_rounds_as_it_is_given(mode: str, others_us: list[float]) -> None:
    rules = TimingRules(warm_calls=SLOTS, baseline_rounds=7)
    run = race(FakeRunner(itertools.repeat(100.0), itertools.cycle(others_us)), "reference", mode, rules=rules)
    run.run(budget_s=10)
    assert len(run.others) == rules.baseline_rounds


def test_a_spent_budget_ends_the_race_after_the_fewest_rounds() -> None:
    runner = FakeRunner(itertools.repeat(100.0), itertools.cycle([40.0, 50.0, 60.0]))
    run = race(runner)
    run.run(budget_s=0)
    assert len(run.others) == MIN_ROUNDS


def test_a_race_that_takes_long_does_with_the_fewest_rounds() -> None:
    run = race(steady(), rules=TimingRules(warm_calls=SLOTS, min_rounds=rounds(9), max_rounds=12, patience_s=0.0))
    run.run(budget_s=10)
    assert len(run.others) == TimingRules().fewest_rounds < 9


def test_a_race_that_has_taken_its_time_does_with_an_interval_twice_as_wide_as_wanted() -> None:
    for spread, passed in ((0.05, True), (0.3, False)):
        dice = random.Random(0)
        others_us = (dice.lognormvariate(4.0, spread) for _ in itertools.count())
        runner = FakeRunner(itertools.repeat(100.0), others_us, other_hand_off_s=0.02)
        run = race(runner, mode="graph", rules=TimingRules(warm_calls=SLOTS, max_rounds=60, usual_s=0.5))
        run.run(budget_s=10)
        target = TimingRules().target_half_width["graph"]
        assert run.score().ratio.half_width > target and (run.score().ratio.half_width <= 2 * target) == passed
        assert (len(run.others) < 40) if passed else (len(run.others) == 120)


def test_long_calls_are_warm_after_some_time_and_short_ones_after_some_calls() -> None:
    long, short = steady(other_hand_off_s=0.05), steady()
    race(long, rules=TimingRules(warm_calls=10**6, max_warm_calls=10**6, warm_s=0.1)).run(budget_s=10)
    race(short, rules=TimingRules(warm_calls=5 * SLOTS, warm_s=10.0)).run(budget_s=10)
    warm_up = [runner.log.count("other block") - len(runner.collected) for runner in (long, short)]
    assert warm_up[0] in (2, 3) and warm_up[1] == 5


def test_a_block_may_use_some_of_the_slots() -> None:
    runner = steady(slots=40)
    run = race(runner, slots=6)
    run.run(budget_s=10)
    assert (runner.generated, runner.published) == (6, 6) and all(len(block.iterations_us) == 6 for block in run.others)


def test_every_round_has_new_contents_revealed_just_before_the_candidate() -> None:
    runner = steady()
    race(runner).run(budget_s=10)
    start = runner.log.index("other prepare") + 1
    rounds = "|".join(runner.log[start:-1]).split("generate_inputs")[1:]
    orders = {
        "|publish_inputs|other block|trusted block|": "warm-up",
        "|trusted block|publish_inputs|other block|": "warm-up",
        "|publish_inputs|other block|collect|trusted block|": "candidate first",
        "|trusted block|publish_inputs|other block|collect|": "reference first",
    }
    kinds = [orders[(item if item.endswith("|") else item + "|").replace("look again|", "")] for item in rounds]
    assert kinds[0] == "warm-up"
    assert "warm-up" not in kinds[-MIN_ROUNDS:]
    assert len(runner.collected) == MIN_ROUNDS


def test_what_comes_late_is_waited_for_at_random_and_after_one_block_of_four_for_certain() -> None:
    patterns = set()
    for _ in range(100):
        runner = steady()
        race(runner).run(budget_s=10)
        blocks = "|".join(runner.log).split("collect")[1:]
        assert all("look again" not in block or block.startswith("|look again") for block in blocks)
        looks = ["|look again" in block for block in blocks]
        assert all(any(looks[first : first + 4]) for first in range(MIN_ROUNDS - 3))
        patterns |= {tuple(looks[first : first + 2]) for first in range(MIN_ROUNDS - 1)}
        patterns |= {tuple(looks[first : first + 3]) for first in range(MIN_ROUNDS - 2)}
    assert len(patterns) == 2**2 + 2**3  # whatever came before, the next may be waited for or not


def test_a_race_forgets_what_a_broken_off_one_collected() -> None:
    runner = steady()
    runner.collected.append([0])
    race(runner).run(budget_s=10)
    assert runner.log[0] == "discard"
    assert len(runner.collected) == MIN_ROUNDS


def test_warming_ends_when_the_budget_does() -> None:
    runner = FakeRunner(itertools.cycle([100.0, 200.0]), itertools.cycle([50.0, 90.0]), other_hand_off_s=0.02)
    run = race(runner, rules=TimingRules(warm_calls=SLOTS, max_warm_calls=10**6, min_rounds=rounds(9), max_rounds=9))
    run.run(budget_s=0.1)
    assert len(run.others) == 9


def test_a_reference_that_changes_its_inputs_gets_the_candidate_new_ones() -> None:
    runner = steady(problem=FakeProblem(frozenset({"logits"})))
    race(runner, rules=TimingRules(warm_calls=SLOTS, min_rounds=rounds(30), max_rounds=30)).run(budget_s=10)
    text = "|".join(runner.log)
    assert "trusted block|generate_inputs|publish_inputs|other block" in text
    assert "trusted block|publish" not in text


def test_timed_outputs_are_collected_at_random_with_the_last_and_judged_after_the_race() -> None:
    runner = steady(slots=40)
    race(runner).run(budget_s=10)
    assert all(len(slots) >= 10 and slots == sorted(set(slots)) for slots in runner.collected)
    last_slots = [order[-1] for order in runner.orders["other"][-len(runner.collected) :]]
    assert all(last in slots for last, slots in zip(last_slots, runner.collected, strict=True))
    assert len({tuple(slots) for slots in runner.collected}) > 1
    assert runner.log[-1] == "judge timing"
    assert runner.log.count("judge timing") == 1


@pytest.mark.parametrize(("judge_s", "expected"), [(0.008, 4.17), (0.4, 0.1)])
def test_where_judging_takes_long_fewer_outputs_are_collected_at_random(judge_s: float, expected: float) -> None:
    runner = steady(slots=40, judge_s=judge_s)
    run = race(runner)
    run.discarded = 19  # rounds that there were
    chosen = [run._chosen_slots(39) for _ in range(3000)]
    assert sum(map(len, chosen)) / len(chosen) == pytest.approx(expected, rel=0.3)
    assert {slot for slots in chosen for slot in slots} >= ({39} if expected < 1 else set(range(40))) and len({*map(tuple, chosen)}) > 1


def test_however_long_judging_takes_some_timed_outputs_are_compared() -> None:
    """How long it takes is up to the candidate, too, which must not come away unseen."""
    counts = []
    for _ in range(60):
        runner = steady(slots=40, judge_s=1e6)
        race(runner, rules=replace(RULES, min_rounds=rounds(12))).run(budget_s=10)
        assert all(len(slots) == 1 for slots in runner.collected)
        counts.append(len(runner.collected))
    assert min(counts) >= 2 and sum(counts) / len(counts) == pytest.approx(2 + sum(2 / r for r in range(3, 13)), rel=0.2)


def test_in_blocks_that_count_calls_are_locked_on_both_sides() -> None:
    runner = steady(slots=40, locks=True)
    run = race(runner)
    run.run(budget_s=10)
    counting = len(run.others)
    for side, locks in (("other", runner.locked), ("trusted", runner.trusted_locked)):
        for locked, order in zip(locks, runner.orders[side], strict=True):
            assert all(position > 0 and order[position] == slot for position, slot, _ in locked.calls)
        assert all(len(locked.calls) == RULES.locked_calls for locked in locks[-counting:]) and not any(
            lock.calls for lock in locks[:-counting]
        )
        assert len({locked.calls[0][0] for locked in locks[-counting:]}) > 3
    assert not any(runner.steps) and not any(runner.trusted_steps)
    assert runner.log.count("hold to") == counting and runner.log.index("hold to") == runner.log.index("collect") - 1


def test_nothing_is_locked_where_inputs_are_too_large() -> None:
    runner = steady()
    run = race(runner)
    run.run(budget_s=10)
    assert (
        not any(locked.calls for locked in [*runner.locked, *runner.trusted_locked]) and locked_excess(run.references, run.others) is None
    )
    assert run.score().by == "quantile" and run.score().ratio.median == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("side", "changeable", "renewed"), [("reference", (), False), ("reference", ("x",), True), ("candidate", (), True)]
)
def test_contents_are_new_in_every_round_unless_nobody_could_know_them(side: str, changeable: set[str], renewed: bool) -> None:
    runner = steady(problem=FakeProblem(changeable=frozenset(changeable)))
    run = race(runner, side)
    run.run(budget_s=10)
    blocks = len(runner.orders["other"])
    assert blocks >= len(run.others) >= RULES.fewest_rounds
    assert (runner.log.count("generate_inputs") >= blocks, runner.log.count("publish_inputs") > blocks) == (renewed, renewed)
    if not renewed:
        assert runner.log.count("generate_inputs") == runner.log.count("publish_inputs") == 1


@pytest.mark.parametrize(
    ("times", "usual_us", "mean_us"),
    [
        ([400.0, 300.0, 200.0, 150.0] + [100.0] * 8, 100.0, 154.17),
        ([90.0, 90.0, 90.0, 90.0, 130.0, 99.0, 180.0, 100.0, 101.0, 160.0, 102.0, 170.0], (0.2 * 99.0 + 100.0 + 0.4 * 101.0) / 1.6, 116.83),
        ([300.0, 100.0, 120.0], (0.8 * 100.0 + 0.0 * 120.0) / 0.8, 173.33),
        ([5.0], 5.0, 5.0),
    ],
)
def test_calls_that_the_host_holds_up_count_in_the_mean_only(times: list[float], usual_us: float, mean_us: float) -> None:
    block = BlockTimes(tuple(times), sum(times), 1e6, (0.1, 0.3))
    assert block.usual_us == pytest.approx(usual_us) and block.mean_us == pytest.approx(mean_us, abs=0.01)
    assert block.skew == pytest.approx(mean_us / usual_us, rel=1e-3)


@pytest.mark.parametrize(("mode", "usual_us"), [("eager", 60.0), ("graph", (60.0 / 2 + 90.0 + 95.0 + 200.0 / 2) / 3)])
def test_a_third_of_the_eager_calls_is_enough_and_the_middle_half_of_the_replayed_ones(mode: str, usual_us: float) -> None:
    calls = [60.0, 500.0, 400.0, 60.0, 60.0, 95.0, 90.0, 200.0]
    run = race(FakeRunner(itertools.repeat(100.0), itertools.repeat(calls)), mode=mode, before=before(mode, uneven(6_500.0, 100.0)))
    run.run(budget_s=10)
    assert run.score().by == "quantile" and run.score().times_us.median == usual_us
    assert run.score().ratio.median == pytest.approx(100.0 / usual_us)


def test_eager_calls_of_all_blocks_count_together_and_replays_round_by_round() -> None:
    """Each side is held up in two of three blocks, never both at once: no round compares what was not held up."""
    times = {mode: FakeRunner(itertools.cycle([100.0, 100.0, 160.0]), itertools.cycle([80.0, 50.0, 50.0])) for mode in ("eager", "graph")}
    ratios = {}
    for mode, runner in times.items():
        run = race(runner, mode=mode, rules=TimingRules(warm_calls=SLOTS, min_rounds=rounds(9), max_rounds=9))
        run.run(budget_s=10)
        ratios[mode] = run.score().ratio
    assert ratios["eager"].median == pytest.approx(2.0) and ratios["eager"].half_width == 0.0
    assert ratios["graph"].half_width > 0.1


def test_how_narrow_the_interval_is_is_looked_at_every_third_round() -> None:
    run = race(steady(), rules=TimingRules(warm_calls=SLOTS, min_rounds=rounds(10), max_rounds=30))
    run.run(budget_s=10)
    assert len(run.others) == 12


def test_both_sides_are_scored_by_the_mean_where_the_candidate_s_calls_are_unequal() -> None:
    runner = FakeRunner(itertools.repeat(uneven(180.0, 100.0)), itertools.repeat(uneven(600.0, 50.0)))
    run = race(runner)
    run.run(budget_s=10)
    assert run.score().by == "mean" and run.score().ratio.median == pytest.approx(880.0 / 950.0)


def test_every_block_uses_its_slots_in_an_order_of_its_own() -> None:
    runner = steady(slots=40)
    race(runner).run(budget_s=10)
    orders = [tuple(order) for side in runner.orders.values() for order in side]
    assert len(orders) > 15 and len(set(orders)) == len(orders)


def test_blocks_are_told_how_fast_the_fastest_core_of_a_trusted_rank_was() -> None:
    """What a candidate's ranks say of their cores is not believed."""
    runner = steady(session=FakeSession(full_pace_us=40.0))
    race(runner).run(budget_s=10)
    first = [side for side, _ in runner.cores].index("trusted")
    assert [core["full_us"] for _, core in runner.cores] == [40.0] * (first + 1) + [10.0] * (len(runner.cores) - first - 1)


def test_both_blocks_of_a_round_look_for_cores_in_one_order_and_every_round_in_another() -> None:
    runner = steady()
    race(runner).run(budget_s=10)
    rounds = list(zip(runner.cores[::2], runner.cores[1::2], strict=True))
    assert all({side for side, _ in pair} == {"trusted", "other"} and len({core["first"] for _, core in pair}) == 1 for pair in rounds)
    assert len({core["first"] % 8 for (_, core), _ in rounds}) > 2


def uneven(first: float, other: float) -> list[float]:
    """A block whose first call takes longer than its other ones."""
    return [first] + [other] * (SLOTS - 1)


@pytest.mark.parametrize("usual_us", [60.0, 5.0])
def test_computing_everything_in_the_first_call_gains_nothing(usual_us: float) -> None:
    """The mean then stands for the block: it holds all the work, where a usual call would leave out nearly all of it."""
    runner = FakeRunner(itertools.repeat(100.0), itertools.repeat(uneven(8 * 100.0 - 7 * usual_us, usual_us)))
    run = race(runner)
    run.run(budget_s=10)
    assert run.score().by == "mean"
    assert run.score().ratio.median == pytest.approx(1.0) and run.score().times_us.median == pytest.approx(100.0)


@pytest.mark.parametrize("where", ["in this race", "in the race before"])
def test_calls_as_unequal_as_the_reference_s_are_scored_by_a_quantile(where: str) -> None:
    """Slots may differ in size: a layout that is unequal for the reference is so for everybody."""
    unequal = uneven(1000.0, 50.0)
    runner = FakeRunner(itertools.repeat(unequal if where == "in this race" else 50.0), itertools.repeat(uneven(500.0, 25.0)))
    run = race(runner, before=None if where == "in this race" else before("eager", unequal))
    run.run(budget_s=10)
    assert run.score().by == "quantile" and run.score().ratio.median == pytest.approx(2.0)


def test_a_disturbed_block_now_and_then_changes_nothing() -> None:
    blocks = itertools.cycle([50.0, 50.0, uneven(3000.0, 50.0)])
    run = race(FakeRunner(itertools.repeat(100.0), blocks))
    run.run(budget_s=10)
    assert run.score().by == "quantile" and run.score().ratio.median == pytest.approx(2.0)


def test_a_gpu_that_is_still_busy_after_every_block_is_tampered() -> None:
    with pytest.raises(Rejected, match="integrity_failure") as caught:
        race(steady(latency_us=3000.0), latency_limit_us=600.0).run(budget_s=10)
    assert "busy when the block is over" in caught.value.verdict.reason


def test_a_round_that_is_disturbed_while_ranks_come_up_does_not_count() -> None:
    runner = steady(latency_us=3000.0, session=FakeSession(coming_up=2))
    run = race(runner, latency_limit_us=600.0)
    with pytest.raises(Rejected):
        run.run(budget_s=10)
    assert run.suspicious == run.discarded == RULES.max_rounds + 1
    assert len([core for side, core in runner.cores if side == "other"]) >= run.discarded + 2
    assert runner.session.coming_up < 0, "they were waited for"


def test_the_reference_s_own_race_says_how_an_idle_gpu_answers() -> None:
    run = race(steady(latency_us=35.0), side="reference")
    run.run(budget_s=10)
    assert run.idle_latency_us == 35.0


class FloorRunner(FakeRunner):
    """A case that moves 1 GB through the memory of one GPU."""

    case = type("Case", (), {"world_size": 1})()

    def cost_of(self) -> Cost:
        return Cost(hbm_bytes=1e9, egress_bytes=0.0, ingress_bytes=0.0)


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ([10.0] * SLOTS, f"{SLOTS} call"),  # the sum is too short
        ([1.0] * (SLOTS - 1) + [1e6], "1 call"),  # the sum is long enough, but not the call that is scored
    ],
)
def test_a_time_below_what_the_hardware_can_do_is_tampered(times: list[float], says: str) -> None:
    runner = FloorRunner(itertools.repeat(1.0), itertools.repeat(1.0))
    runner.problem.cost = lambda case, rank: runner.cost_of()  # type: ignore[attr-defined]
    speed = Benchmark(runner, ("eager",), RULES, H200_SXM, (), 0.0)  # type: ignore[arg-type]
    run = race(runner)
    run.others = [BlockTimes(tuple(times), 1.0, 2.0)]
    with pytest.raises(Rejected) as caught:
        speed._check_floor(run)
    assert says in caught.value.verdict.reason
    run.others = [BlockTimes((1000.0,) * SLOTS, 1.0, 2.0)]
    speed._check_floor(run)


def test_reference_against_reference_is_not_judged() -> None:
    runner = steady()
    race(runner, side="reference").run(budget_s=10)
    assert not runner.collected
    assert "judge timing" not in runner.log


@pytest.mark.parametrize(
    ("mode", "prepare_s", "captures"),
    [
        ("eager", 0.0, 1),
        ("graph", 0.0, MIN_ROUNDS),
        ("graph", 0.01, 1 + (MIN_ROUNDS - 1) // 2),
        ("graph", 1e3, 1 + (MIN_ROUNDS - 1) // RULES.rounds_per_capture),
    ],
    ids=["not at all", "in every round", "when rounds took as long", "at the latest"],
)
def test_graphs_are_captured_anew_as_often_as_that_is_cheap(mode: str, prepare_s: float, captures: int) -> None:
    runner = steady(trusted_hand_off_s=0.002, other_hand_off_s=0.004, prepare_s=prepare_s)
    race(runner, mode=mode).run(budget_s=1e6)
    assert runner.log.count("other prepare") == runner.log.count("trusted prepare") == captures
    again = [name for name, after in itertools.pairwise(runner.log) if after == "trusted warm"]
    assert again == ["other prepare"] * (captures - 1)
    assert runner.log.count("other warm") == captures - 1


def test_how_long_a_candidate_lets_itself_be_captured_changes_nothing() -> None:
    runner = steady(other_prepare_s=1e3)
    run = race(runner, mode="graph")
    run.run(budget_s=1e6)
    assert runner.log.count("other prepare") == run.captures == len(run.others) > 1


def test_graphs_are_replayed_on_contents_that_are_known_before_they_are_timed() -> None:
    """Who could work on what is generated next would have its calls of a block behind it when they are timed."""
    runner = steady()
    race(runner, mode="graph").run(budget_s=10)
    places = [place for place, name in enumerate(runner.log) if name == "other warm"]
    assert places
    for place in places:
        before = runner.log[:place]
        assert before[::-1].index("other block") < before[::-1].index("generate_inputs")


def test_a_failed_capture_says_why() -> None:
    with pytest.raises(CaptureFailed, match="no capture"):
        race(steady(captured=False), mode="graph").run(budget_s=10)


def test_every_slot_is_called_before_its_first_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles and connections that a first call creates cannot be created under capture; graph mode may be all that is asked for."""
    monkeypatch.setattr(Benchmark, "_probe", lambda self: {"graph": SLOTS})
    runner = steady(captured=False)
    speed = Benchmark(runner, ("graph",), RULES, None, (), 0.0)  # type: ignore[arg-type]
    speed.baseline()
    assert runner.log[:5] == ["open", "generate_inputs", "publish_inputs", "other call", "discard"]
    assert runner.log.index("other call") < runner.log.index("other prepare")
    assert "no capture" in speed.unmeasurable["graph"]


def test_events_that_span_more_than_the_outer_clock_are_tampered() -> None:
    with pytest.raises(Rejected) as caught:
        race(steady(gaps_us=[1e9] * SLOTS)).run(budget_s=10)
    assert caught.value.verdict.kind == "integrity_failure"


def test_clocks_of_ranks_without_candidate_code_accuse_nobody() -> None:
    with pytest.raises(HarnessError, match="the events span"):
        race(steady(gaps_us=[1e9] * SLOTS), side="reference").run(budget_s=10)
    with pytest.raises(HarnessError, match="trusted reference cannot be timed"):
        race(steady(trusted_us=-1.0)).run(budget_s=10)


def test_a_candidate_whose_outer_clock_always_runs_longer_is_tampered() -> None:
    with pytest.raises(Rejected, match="integrity_failure"):
        race(steady(other_hand_off_s=0.02), slack_limit_us=15_000.0).run(budget_s=10)


@pytest.mark.parametrize(
    ("other_s", "trusted_s", "usual_us", "hidden"),
    [(0.006, 0.0, 0.0, True), (0.0005, 0.0, 0.0, False), (0.006, 0.006, 0.0, False), (0.006, 0.0, 9_000.0, False)],
    ids=["hidden", "small", "a slow host", "slow ranks"],
)
def test_time_that_no_single_block_shows_is_found_in_all_of_them(other_s: float, trusted_s: float, usual_us: float, hidden: bool) -> None:
    runner = steady(trusted_hand_off_s=trusted_s, other_hand_off_s=other_s)
    run = race(runner, slack_limit_us=15_000.0, usual_excess_us=usual_us)
    if hidden:
        with pytest.raises(Rejected) as caught:
            run.run(budget_s=10)
        assert "in the usual block the outer clock exceeds the events by 6000 us more" in caught.value.verdict.reason
    else:
        run.run(budget_s=10)
    assert run.excess_us().median == pytest.approx((other_s - trusted_s) * 1e6, abs=10)


@pytest.mark.parametrize(
    ("claimed_us", "true_us", "more", "stretches"),
    [
        (50.0, 50.0, {}, 3),
        (50.0, 100.0, {}, 9),
        (90.0, 100.0, {}, 3),
        (100.0, 200.0, {}, 0),
        (50.0, 100.0, {"problem": FakeProblem(frozenset({"x"}))}, 0),
        (50.0, 100.0, {"trusted_us": 4_000.0}, 0),
    ],
    ids=["true", "forged", "within what is allowed", "not faster", "calls change inputs", "a block is long enough"],
)
def test_claims_are_held_against_stretches_of_calls(claimed_us: float, true_us: float, more: dict[str, Any], stretches: int) -> None:
    slots, rules = 6, TimingRules(warm_calls=SLOTS, min_rounds=rounds(9), max_rounds=9, hidden_us=1_000.0)
    runner = steady(**{"other_us": claimed_us, "slots": slots, "true_us": (more.get("trusted_us", 100.0), true_us), **more})
    run = race(runner, rules=rules, usual_excess_us=0.0)
    run.run(budget_s=10)
    blocks, judged, logged = len(runner.orders["other"]), len(runner.collected), len(runner.log)
    if stretches == rules.max_stretches:
        with pytest.raises(Rejected) as caught:
            REFUSE_FALSE_CLAIMS(run)
        assert re.search(r"204 calls behind each other take (49|5\d)\.\d us each longer", caught.value.verdict.reason)
    else:
        REFUSE_FALSE_CLAIMS(run)
    orders = runner.orders["other"][blocks:]
    assert [len(order) for order in orders] == [34 * slots] * stretches and len(runner.collected) - judged == stretches
    assert len({tuple(order) for order in orders}) == stretches
    assert run.stretches_us == pytest.approx([true_us - claimed_us] * stretches, abs=5.0)
    assert [runner.log[logged:].count(step) for step in ("generate_inputs", "publish_inputs")] == [stretches, stretches]
    assert runner.parts == {(True, rules.eager_parts), *([(False, rules.eager_parts)] if stretches else [])}


@pytest.mark.parametrize(
    ("excess_us", "outputs", "refused"), [((25.0, 29.0), 1, 0), ((25.0, 60.0), 1, 25), ((60.0, 60.0), 1, 0), ((25.0, 60.0), 3, 0)]
)
def test_what_locked_calls_take_is_no_secret(excess_us: tuple[float, float], outputs: int, refused: int) -> None:
    """20 us and a twentieth of the reference's 100 us are the most, and 8 us for every further output."""
    runner = steady(locks=True, other_us=80.0, output_tensors=outputs, locked_excess_us=excess_us)
    run = race(runner, rules=replace(RULES, stretch_us={"eager": 0.0}))
    run.run(budget_s=10)
    assert locked_excess(run.references, run.others).median == pytest.approx(excess_us[1] - excess_us[0])  # type: ignore[union-attr]
    if refused:
        with pytest.raises(Rejected) as caught:
            REFUSE_FALSE_CLAIMS(run)
        assert "locked calls take 35.0 us longer by the outer clock" in caught.value.verdict.reason
        assert f"{refused:.1f} us is the most" in caught.value.verdict.reason
    else:
        REFUSE_FALSE_CLAIMS(run)


LIMITS = replace(RULES, locked_slack_us={"eager": 4.0, "graph": 4.0}, locked_slack_share=0.01)
"""5 us, of a call of 100"""


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("locked_us", "least_us"),
    [(80.0, 80.0), (57.0, 57.0 - 4.57), (54.0, None), (40.0, None)],
    ids=["prepares", "a little", "within", "faster"],
)
def test_calls_that_were_prepared_win_nothing_but_what_cannot_be_told(mode: str, locked_us: float, least_us: float | None) -> None:
    run = race(steady(slots=12, locks=True, locked_us=locked_us), mode=mode, rules=LIMITS)
    run.run(budget_s=10)
    assert run.score().by == ("quantile" if least_us is None else "locked")
    assert run.score().times_us.median == pytest.approx(least_us or 50.0) and run.score().ratio.median == pytest.approx(
        100.0 / (least_us or 50.0)
    )
    assert run.score().blocks_us == pytest.approx([least_us or 50.0] * len(run.others))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_events_that_lie_in_most_blocks_or_of_most_calls_win_no_more_either(mode: str) -> None:
    """A call takes 40 us, whatever is said of it: in two blocks of three, or of under half of the calls in all of them."""
    blocks = [[4.0] * 12, [4.0] * 12, [40.0] * 12]
    calls = [[4.0, 40.0] * 5 + [40.0] * 2]
    for claims in (blocks, calls):
        runner = FakeRunner(itertools.repeat(100.0), itertools.cycle(claims), slots=12, locks=True, outer_us=65.0)
        run = race(runner, mode=mode, rules=LIMITS)
        run.run(budget_s=10)
        assert run.score().times_us.median == pytest.approx(37.5, abs=2.6)
        assert run.score().ratio.median < 3.3, "ratios of rounds have a middle of their own"


def test_who_lies_is_asked_even_if_it_wins_nothing() -> None:
    run = race(steady(slots=12, locks=True, outer_us=130.0), mode="graph", rules=LIMITS)
    run.run(budget_s=10)
    assert run.score().by == "locked" and run.score().ratio.median == pytest.approx(1.0)
    with pytest.raises(Rejected, match="integrity_failure"):
        REFUSE_FALSE_CLAIMS(run)


def test_what_both_sides_wait_for_in_locked_calls_costs_nobody_anything() -> None:
    """Keys that come apart, say: events of both hold it."""
    runner = steady(slots=12, locks=True, locked_us=50.0 + 45.0)
    runner.trusted_locked_us = 100.0 + 45.0
    run = race(runner, mode="graph", rules=LIMITS)
    run.run(budget_s=10)
    assert run.score().by == "quantile" and run.score().ratio.median == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("claimed_us", "around_us", "refused"), [(200.0, 4_000.0, True), (200.0, 300.0, True), (200.0, 60.0, False), (1_000.0, 60.0, False)]
)
def test_who_disturbs_the_reference_hides_nothing_behind_it(mode: str, claimed_us: float, around_us: float, refused: bool) -> None:
    """A call takes 1 ms, whatever is said of it. What disturbs both a little costs nobody anything."""
    usual = steady(1_000.0, 1_000.0, slots=12, locks=True)
    baseline = race(usual, side="reference", mode=mode)
    baseline.run(budget_s=10)
    assert baseline.around_us() == 25.0
    assert all(any(locked.calls for locked in side) for side in (usual.locked, usual.trusted_locked)) and not usual.collected
    outer_us = 1_000.0 + min(around_us, 100.0 if refused else math.inf)
    runner = steady(1_000.0, claimed_us, slots=12, locks=True, outer_us=outer_us, locked_excess_us=(around_us, 25.0))
    run = race(runner, mode=mode, before=baseline)
    if refused:
        with pytest.raises(HarnessError, match="too disturbed to hold claims"):
            run.run(budget_s=10)
    else:
        run.run(budget_s=10)
        assert 1.0 - 1e-9 <= run.score().ratio.median < 1.08


def test_a_locked_call_is_held_against_calls_as_they_stand_for_a_block() -> None:
    """On a busy host most calls, locked ones too, take longer than the quickest third. Both sides' do: no candidate is to pay for it."""
    calls = [190.0, 160.0, 160.0, 130.0, 100.0, 100.0, 160.0, 160.0]
    blocks = [
        replace(BlockTimes.of([answer(iterations_us=calls, span_us=sum(calls))], SLOTS, 1e5, (0.1, 0.3)), locked_us=((3, 180.0),))
    ] * 9
    known = Rounds(mode="eager", side="reference", rules=RULES, references=blocks, others=blocks)
    rules = replace(RULES, locked_slack_us={"eager": 0.0}, locked_slack_share=0.0)
    run = Rounds(mode="eager", side="candidate", rules=rules, before=known, references=blocks, others=blocks)
    assert blocks[0].usual_us == pytest.approx(100.0) and run.score().by == "quantile"


def locked_rounds(mode: str, around_us: list[float], claimed_us: float = 100.0) -> Rounds:
    """Of a candidate whose call takes 1 ms like the reference's, whatever it claims, with 30 us around a locked one; around the
    reference's lies so much, and 30 us did before."""
    sides: list[list[BlockTimes]] = [[], [], []]
    for lies_us in around_us:
        for blocks, us, outer_us in zip(sides, (1_000.0, 1_000.0, claimed_us), (1_030.0, 1_000.0 + lies_us, 1_030.0), strict=True):
            blocks.append(replace(BlockTimes.of([answer(us)], SLOTS, 1e5), locked_us=((3, outer_us),)))
    known = Rounds(mode=mode, side="reference", rules=TimingRules(), references=sides[0], others=sides[0])
    return Rounds(mode=mode, side="candidate", rules=TimingRules(), before=known, references=sides[1], others=sides[2])


@pytest.mark.parametrize(("mode", "varies_us", "slack_us"), [("eager", 40.0 + 200.0, 20.0 + 50.0), ("graph", 5.0 + 50.0, 5.0 + 50.0)])
def test_who_disturbs_the_reference_makes_locked_calls_no_less_certain(mode: str, varies_us: float, slack_us: float) -> None:
    """In some rounds, in most by what varies anyway, or both: what may vary is allowed once."""
    some, most = [2_000.0] * 4 + [30.0] * 5, [30.0 + 0.95 * varies_us] * 5
    for around_us in (some, [*most, *[30.0] * 4], [*most, *[2_000.0] * 4]):
        run = locked_rounds(mode, around_us)
        assert run.unexplained_us == 0.0 and run.score().by == "locked"
        assert run.score().times_us.median == pytest.approx(1_000.0 - varies_us - slack_us, rel=0.025)
    assert locked_rounds(mode, [2_000.0] * 5 + [30.0] * 4).unexplained_us == pytest.approx(1_970.0 - varies_us, rel=0.01)


def test_a_reference_that_is_slower_beside_a_candidate_leaves_its_locked_calls_no_more() -> None:
    """What may vary, and what a locked call may seem longer by, are shares of what it took before."""
    run = locked_rounds("eager", [2_000.0] * 4 + [30.0] * 5)
    for place, block in enumerate(run.references):
        calls, outer_us = tuple(3 * us for us in block.iterations_us), block.locked_outer_us + 2_000.0
        run.references[place] = replace(block, iterations_us=calls, locked_us=((3, outer_us),))
    assert run.score().times_us.median == pytest.approx(1_000.0 - 240.0 - 20.0 - 50.0)


@pytest.mark.parametrize(("around_us", "least_us"), [(30.0, 100.0 - 5.0 - 5.0), (39.0, 91.0 - 5.0 - 4.8), (500.0, 100.0 - 2 * (5.0 + 5.0))])
def test_what_is_a_share_of_a_long_call_is_not_all_of_one_that_is_ten_times_as_fast(around_us: float, least_us: float) -> None:
    """A call of 100 us is said to take 1, beside one of a millisecond, whose locked calls are disturbed or not."""
    run = locked_rounds("graph", [around_us] * 9, claimed_us=1.0)
    run.others = [replace(block, locked_us=((3, 130.0),)) for block in run.others]
    assert run.score().by == "locked" and run.score().times_us.median == pytest.approx(least_us, abs=0.6)


def test_what_a_candidate_s_locked_calls_take_is_as_uncertain_as_its_rounds_say() -> None:
    run = locked_rounds("graph", [30.0] * 9)
    for place in range(4):
        run.others[place] = replace(run.others[place], locked_us=((3, 830.0),))
    assert run.score().times_us.median == pytest.approx(800.0 - 5.0 - 50.0)


def test_a_disturbed_reference_matters_where_it_decides() -> None:
    """Claims that are no less than what is believed all the same are not in doubt: 1000 us, where 940 are believed."""
    around_us = [30.0 + 55.0 + 50.0] * 9
    assert locked_rounds("graph", around_us).unexplained_us == pytest.approx(50.0, abs=0.5)
    assert locked_rounds("graph", around_us, claimed_us=950.0).unexplained_us == 0.0


@pytest.mark.parametrize(("us", "calls"), [(100.0, 204), (10.0, 600), (3_000.0, 0)])
def test_a_stretch_is_worth_20_ms_of_the_reference_s_calls_before_the_candidate_or_600_calls(us: float, calls: int) -> None:
    baseline = race(steady(us, us, slots=12), side="reference")
    baseline.run(budget_s=10)
    run = race(steady(3 * us, us, slots=12), before=baseline)
    run.run(budget_s=10)
    assert 12 * run._stretch_passes == calls
    timed = [len(order) for order in baseline.runner.orders["trusted"] if len(order) > 12]  # type: ignore[attr-defined]
    assert timed == [calls] * 3 * bool(calls) and (baseline.usual_stretch_us < math.inf) == bool(calls)


@pytest.mark.parametrize(("trusted_s", "most_us"), [([0.0, 0.006, 0.001], 6_000.0), ([-0.002, -0.004, -0.001], 0.0)])
def test_the_longest_of_a_few_stretches_says_what_is_usual_unless_all_are_short(trusted_s: list[float], most_us: float) -> None:
    baseline = race(steady(100.0, 100.0, slots=12, true_us=(100.0, 100.0)), side="reference")
    stretches = iter(trusted_s)
    baseline._trusted_stretch = lambda *_: next(stretches) * 1e6  # type: ignore[method-assign]
    baseline.run(budget_s=10)
    assert baseline.usual_stretch_us == pytest.approx(most_us)


@pytest.mark.parametrize("disturbed", [1, 2])
def test_a_disturbed_race_is_run_once_more(disturbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = race(steady(100.0, 100.0), side="reference", mode="graph")
    baseline.run(budget_s=10)
    speed = Benchmark(steady(100.0, 50.0), ("graph",), RULES, None, (), 0.0)  # type: ignore[arg-type]
    speed.slots["graph"], speed.baselines["graph"] = SLOTS, baseline
    unexplained_us = iter([30.0] * disturbed + [0.0])
    monkeypatch.setattr(Race, "unexplained_us", property(lambda _: next(unexplained_us)))
    if disturbed == 1:
        assert measured(speed, "graph").speedup.median == pytest.approx(2.0)
    else:
        with pytest.raises(HarnessError, match="30 us more than varies"):
            speed.measure("graph")


@pytest.mark.parametrize(("reference_us", "kind", "says"), [(170.0, Disturbed, "ms did before"), (120.0, Rejected, "integrity_failure")])
def test_stretches_beside_a_disturbed_reference_do_not_count(reference_us: float, kind: type[Exception], says: str) -> None:
    """Each call of 60 us is said to last 10, and by as much the reference's stretches are held up, by 14 ms, or by 4. Its blocks took 5 ms
    longer now and then, of which there are 17 in a stretch, and a quarter of its 20 ms is what varies."""
    baseline = race(steady(100.0, 100.0, slots=12, true_us=(100.0, 100.0), trusted_hand_off_s=0.005), side="reference")
    baseline.run(budget_s=10)
    assert baseline.usual_stretch_us == pytest.approx(5_000.0, abs=50.0)
    assert len(baseline.runner.orders["trusted"][-1]) == 17 * 12  # type: ignore[attr-defined]
    runner = steady(100.0, 10.0, slots=12, true_us=(reference_us, 60.0))
    run = race(runner, usual_stretch_us=baseline.usual_stretch_us, usual_excess_us=0.0, before=baseline)
    run.run(budget_s=10)
    with pytest.raises(kind, match=says):
        REFUSE_FALSE_CLAIMS(run)


@pytest.mark.parametrize(
    ("side", "longer_us", "spread_us", "refused"),
    [("reference", 25.0, 0.0, True), ("reference", 25.0, 20.0, False), ("reference", 35.0, 20.0, True), ("candidate", 25.0, 20.0, True)],
)
def test_a_stretch_may_be_longer_by_what_the_reference_s_blocks_leave_open(
    side: str, longer_us: float, spread_us: float, refused: bool
) -> None:
    """A tenth of 100 us and 2 ms of 204 calls are the most, and a tenth more where the reference's calls take 80 to 120 us from block to
    block. How much a candidate's vary is up to itself."""
    both = (
        [us, us - spread_us * (which == side), us + spread_us * (which == side)]
        for us, which in ((100.0, "reference"), (50.0, "candidate"))
    )
    runner = FakeRunner(*map(itertools.cycle, both), slots=12, true_us=(100.0, 50.0 + longer_us))
    run = race(runner, usual_excess_us=0.0)
    run.run(budget_s=10)
    if refused:
        with pytest.raises(Rejected, match="integrity_failure"):
            REFUSE_FALSE_CLAIMS(run)
    else:
        REFUSE_FALSE_CLAIMS(run)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("longer_us", "scored_by"), [(90.0, "quantile"), (110.0, "locked")])
def test_long_locked_calls_vary_by_more_whosever_they_are(mode: str, longer_us: float, scored_by: str) -> None:
    """By a hundredth of 10 ms, here, though the reference takes 100 us."""
    runner = FakeRunner(itertools.repeat(100.0), itertools.repeat(10_000.0), slots=12, locks=True, outer_us=10_000.0 + 25.0 + longer_us)
    run = race(runner, mode=mode, rules=LIMITS)
    run.run(budget_s=10)
    assert run.score().by == scored_by


def test_locked_calls_are_compared_as_others_are() -> None:
    """Everybody knows which they are: with none of them compared, or none of the others, garbage would do."""
    runner = steady(slots=40, locks=True)
    race(runner, slots=40).run(budget_s=10)
    locked = [set(item.keys) for item in runner.locked[-len(runner.collected) :]]
    assert all(mine <= set(chosen) and len(chosen) >= 10 for mine, chosen in zip(locked, runner.collected, strict=True))
    found = []
    for _ in range(60):
        runner = steady(slots=40, locks=True, judge_s=1e6)
        race(runner, slots=40, rules=replace(RULES, min_rounds=rounds(3), max_rounds=3)).run(budget_s=10)
        first = next(item for item in runner.locked if item.calls)
        found.append(runner.collected[0] == list(first.keys))
    assert 15 <= sum(found) <= 45


@pytest.mark.parametrize(("slots", "locked"), [(3, 1), (5, 1), (6, 1), (40, 1)])
def test_most_calls_of_a_block_are_not_locked(slots: int, locked: int) -> None:
    runner = steady(slots=slots, locks=True)
    run = race(runner, slots=slots)
    run.run(budget_s=10)
    assert {len(block.counted_us) for block in [*run.others, *run.references]} == {slots - locked}


@pytest.mark.parametrize("parts", [(), (range(3), range(3, 6)), (range(5), range(5, 6))])
def test_locked_calls_do_not_count(parts: tuple[range, ...]) -> None:
    """They find their inputs in the L2 cache."""
    block = BlockTimes((80.0, 10.0, 60.0, 70.0, 10.0, 90.0), 320.0, 1e4, parts=parts, locked_us=((1, 30.0), (4, 50.0)))
    assert block.counted_us == (80.0, 60.0, 70.0, 90.0) and block.mean_us == 75.0
    assert 10.0 not in block.warm_us and len(block.warm_us) >= 2
    assert block.locked_outer_us == 40.0 and block.locked_excess_us == 30.0 and block.locked_delay_us == -65.0
    assert replace(block, locked_us=((0, 100.0),)).locked_delay_us == 20.0


def test_the_claims_of_a_race_are_checked_before_its_outputs_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = steady()
    monkeypatch.setattr(Race, "_refuse_false_claims", lambda run: run.runner.log.append("claims"))
    race(runner).run(budget_s=10)
    assert runner.log[-2:] == ["claims", "judge timing"]
    race(runner, side="reference").run(budget_s=10)
    assert runner.log.count("claims") == 1


def test_a_node_on_which_the_reference_is_disturbed_too_accuses_nobody() -> None:
    with pytest.raises(HarnessError, match="too disturbed"):
        race(steady(trusted_hand_off_s=0.02), slack_limit_us=15_000.0).run(budget_s=10)


def answer(us: float = 1.0, gap_us: float = 0.0, host_gap_us: float = 0.0, **more: Any) -> dict[str, Any]:
    """What a rank says of a block whose calls are all alike."""
    times, gaps = [us] * SLOTS, [gap_us] * (SLOTS - 1) + [0.0]
    return {"iterations_us": times, "gaps_us": gaps, "host_gap_us": host_gap_us, "span_us": sum(times) + sum(gaps), **more}


@pytest.mark.parametrize(
    "times", [[1.0], [1.0] * (SLOTS - 1) + [0.0], [1.0] * (SLOTS - 1) + [float("nan")], [1] * (SLOTS - 1) + [10**400], ["1"] * SLOTS, None]
)
def test_times_that_are_no_times_are_refused(times: Any) -> None:
    with pytest.raises(GroupFailure, match="times"):
        BlockTimes.of([answer(iterations_us=times)], SLOTS, 10.0)
    for more in ({"gaps_us": [0.0] * (SLOTS - 1)}, {"gaps_us": [-1.0] * SLOTS}, {"host_gap_us": None}, {"span_us": "1"}):
        with pytest.raises(GroupFailure, match="numbers"):
            BlockTimes.of([answer(**more)], SLOTS, 10.0)


def test_a_rank_cannot_be_silent_about_what_passes_between_its_calls() -> None:
    """Rounding may leave out a little."""
    assert BlockTimes.of([answer(100.0, 20.0, span_us=945.0)], SLOTS, 1e4).gaps_us == ((*[20.0] * (SLOTS - 1), 0.0),)
    with pytest.raises(GroupFailure, match="do not add up"):
        BlockTimes.of([answer(100.0, 20.0), answer(100.0, 20.0, gaps_us=[0.0] * SLOTS)], SLOTS, 1e4)


@pytest.mark.parametrize(("mode", "free_us", "slack"), [("eager", 24.0, 1.1), ("graph", 26.0, 1.05)])
def test_a_device_that_waits_between_calls_makes_none_of_them_faster(mode: str, free_us: float, slack: float) -> None:
    """Nor does work that is done there. Where the host needs 20 us, gaps of 24 are free, 26 between replays, and a little of a call."""
    run = race(steady(100.0, 10.0, gaps_us=[115.0] * SLOTS, host_gap_us=20.0, other_hand_off_s=0.002), mode=mode)
    run.run(budget_s=10)
    speedup = slack * 100.0 / (10.0 + 115.0 - free_us)
    assert run.score().ratio.median == pytest.approx(speedup) and run.score().times_us.median == pytest.approx(100.0 / speedup)
    assert run.score().by == "middle_round" and run.gaps_us() == (0.0, 115.0)


@pytest.mark.parametrize(("gap_us", "scored_by"), [(33.0, "quantile"), (35.0, "middle_round")])
def test_gaps_that_are_little_beside_calls_cost_nothing(gap_us: float, scored_by: str) -> None:
    run = race(steady(100.0, 100.0, gaps_us=[gap_us] * SLOTS, host_gap_us=20.0, other_hand_off_s=0.002))
    run.run(budget_s=10)
    assert run.score().by == scored_by and run.score().ratio.median == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("tricked", [9, 4])
def test_a_device_that_waits_long_once_a_block_makes_no_call_faster(tricked: int) -> None:
    """The gap is part of the call before it, and the mean of such calls stands for them. Some such blocks cannot hide among others."""
    late, calm = [0.0, 24.0 + 90.0 * SLOTS] + [0.0] * (SLOTS - 2), [0.0] * SLOTS
    blocks = [(10.0, late)] * tricked + [(100.0, calm)] * (9 - tricked)
    run = Rounds(mode="eager", side="candidate", rules=RULES)
    run.references = [BlockTimes.of([answer(100.0, host_gap_us=20.0)], SLOTS, 1e4, (0.1, 0.3))] * 9
    for us, gaps_us in blocks:
        times = {"gaps_us": gaps_us, "span_us": SLOTS * us + sum(gaps_us)}
        run.others.append(BlockTimes.of([answer(us, **times)], SLOTS, 1e4, (0.1, 0.3)))
    assert run.score().by == "middle_round" and run.score().ratio.median == pytest.approx(1.1)


def test_a_ratio_claims_no_less_time_than_is_believed() -> None:
    """The middle of rounds' ratios may lie far from the ratio of middles, where a candidate's rounds are unlike."""
    run = locked_rounds("graph", [30.0] * 9)
    for place, us in enumerate([920.0] * 4 + [950.0] * 5):
        run.others[place] = replace(BlockTimes.of([answer(us)], SLOTS, 1e5), locked_us=((3, 1_030.0),))
    least_us = 1_000.0 - 5.0 - 50.0
    assert run._claimed_ratio().median > 1_000.0 / least_us > 1_000.0 / run._middle_us(run.others)
    assert run.score().ratio.median == pytest.approx(1_000.0 / run.score().times_us.median) and run.score().by == "locked"


@pytest.mark.parametrize(("mode", "ratio"), [("eager", 1.1), ("graph", 1.0)])
def test_a_few_rounds_make_no_race(mode: str, ratio: float) -> None:
    """Four of nine claim a tenth of the time, and hide the rest in the hand-off. The middle replay takes 100 us; eager calls are pooled."""
    run = Rounds(mode=mode, side="candidate", rules=RULES)
    run.references = [BlockTimes.of([answer(100.0)], SLOTS, 1e4)] * 9
    run.others = [BlockTimes.of([answer(us)], SLOTS, 1e4) for us in [10.0] * 4 + [100.0] * 5]
    assert run.score().ratio.median == pytest.approx(ratio) and run.score().by == "middle_round"
    run.side = "reference"
    assert run.score().ratio.median > 1.2, "the reference's own rounds are not held against anything"


@pytest.mark.parametrize("what", ["gap_us", "host_gap_us"])
def test_gaps_of_the_reference_count_as_little_longer_than_before_the_candidate_came(what: str) -> None:
    """Who keeps the host busy beside it would have longer ones of its own."""

    def block(gap_us: float) -> BlockTimes:
        return BlockTimes.of([answer(100.0, **{what: gap_us})], SLOTS, 1e4)

    before = Rounds(mode="eager", side="reference", rules=RULES, references=[block(20.0)] * 6, others=[block(20.0)] * 6)
    run = Rounds(mode="eager", side="candidate", rules=RULES, before=before)
    run.references, run.others = [block(80.0)] * 9, [BlockTimes.of([answer(10.0, 120.0)], SLOTS, 1e4)] * 9
    assert run.score().ratio.median == pytest.approx(1.1 * 100.0 / (10.0 + 120.0 - (1.25 * 1.1 * 20.0 + 2.0)), rel=1e-3)


def test_unequal_calls_of_the_reference_beside_a_candidate_excuse_no_more_than_before() -> None:
    """Every block of both is disturbed here: the reference's by the candidate."""
    usual = Rounds(mode="eager", side="reference", rules=RULES)
    usual.references = usual.others = [BlockTimes((100.0,) * SLOTS, 800.0, 1e4, (0.1, 0.3))] * 6
    run = Rounds(mode="eager", side="candidate", rules=RULES, before=usual)
    run.references = [BlockTimes(tuple(uneven(3_000.0, 100.0)), 3_700.0, 1e4, (0.1, 0.3))] * 9
    run.others = [BlockTimes(tuple(uneven(730.0, 10.0)), 800.0, 1e4, (0.1, 0.3))] * 9
    assert run.score().by == "mean" and run.score().ratio.median == pytest.approx(1.25)


def block(gap_us: float, host_gap_us: float = 0.0, **more: Any) -> BlockTimes:
    """Of calls of 50 us on one rank."""
    return BlockTimes.of([answer(50.0, gap_us, host_gap_us, **more)], SLOTS, 1e4)


def with_gaps(mine: BlockTimes, known: BlockTimes) -> tuple[float, ...]:
    return charged(mine, [gaps.limits(0.25, 5.0, 40.0) for gaps in usual_gaps([known])]).iterations_us


def test_gaps_like_the_reference_s_cost_nothing() -> None:
    """Long calls keep the device busy while outputs are copied; short ones wait for the host."""
    for known in (block(0.0, 20.0), block(20.0, 0.0), block(20.0, 1.0)):
        assert with_gaps(block(29.0), known) == block(29.0).iterations_us
    for known_us, charged_us in ((16.0, 54.0), (0.0, 74.0)):
        assert with_gaps(block(29.0), block(known_us)) == (charged_us,) * SLOTS


def test_of_gaps_and_hosts_the_usual_ones_say_what_is_needed() -> None:
    blocks = [block(20.0, 3.0), block(20.0, 30.0), block(100.0, 4.0)]
    assert usual_gaps(blocks)[0].between == 20.0 and usual_gaps(blocks[1:] + blocks[1:2])[0].between == 30.0


@pytest.mark.parametrize("size", [2, 4, SLOTS])
def test_what_passes_between_parts_says_nothing_of_gaps(size: int) -> None:
    """Behind the last call of a part there is no gap."""
    gaps_us = tuple(0.0 if place % size == size - 1 else 20.0 for place in range(SLOTS))
    known = replace(block(0.0), gaps_us=(gaps_us,))
    assert device_gap_us([known]) == 20.0 and usual_gaps([known])[0].between == 20.0


@pytest.mark.parametrize(("first", "second", "slowest_us"), [((50.0, 20.0), (10.0, 60.0), 50.0), ((10.0, 90.0), (50.0, 20.0), 75.0)])
def test_each_rank_s_gaps_are_part_of_its_own_calls(first: tuple[float, float], second: tuple[float, float], slowest_us: float) -> None:
    """One that waits for nobody gains nothing by being the only one whose device is kept waiting. Here gaps of 25 and 55 us are free."""
    known = BlockTimes.of([answer(50.0, 10.0, 16.0), answer(50.0, 40.0)], SLOTS, 1e4)
    assert with_gaps(BlockTimes.of([answer(*first), answer(*second)], SLOTS, 1e4), known) == (slowest_us,) * SLOTS
    assert device_gap_us([known]) == 40.0


@pytest.mark.parametrize("locked", [(), (3,)])
def test_a_host_that_is_ahead_is_so_in_calls_that_no_gap_follows(locked: tuple[int, ...]) -> None:
    """The last calls of parts, and one before a locked call, are as short as others. Here all bear 60 us, and the first of a part none."""
    known = replace(block(20.0), locked_us=tuple((place, 90.0) for place in locked))
    gaps_us = (87.0, 87.0, 50.0 if locked else 87.0, 0.0, 87.0, 87.0, 87.0, 0.0)
    found = with_gaps(replace(block(0.0), locked_us=known.locked_us, gaps_us=(gaps_us,)), known)
    assert found == pytest.approx([50.0 if place in locked else 50.0 + 87.0 - 30.0 for place in range(SLOTS)])


def test_gaps_beside_locked_calls_are_held_against_the_reference_s() -> None:
    """There the device waits for the key, and digests. Locked calls themselves are timed by the outer clock."""
    known = replace(block(0.0, 20.0), locked_us=((3, 90.0),), gaps_us=((10.0, 10.0, 60.0, 70.0, 10.0, 10.0, 10.0, 0.0),))
    assert usual_gaps([known]) == [Gaps(20.0, 60.0, 70.0)] and device_gap_us([known]) == 10.0
    mine = replace(block(0.0), locked_us=((2, 90.0),), gaps_us=((10.0, 100.0, 110.0, 10.0, 10.0, 10.0, 10.0, 0.0),))
    assert with_gaps(mine, known) == mine.iterations_us
    slower = replace(mine, gaps_us=((10.0, 130.0, 140.0, *[10.0] * 4, 0.0),))
    assert with_gaps(slower, known) == (50.0, 80.0, 50.0, 80.0, *[50.0] * 4)


@pytest.mark.parametrize(("locked", "forkers"), [([7], {6: 645.0}), ([6, 7], {}), ([3], {7: 645.0})])
def test_a_gap_behind_the_last_call_is_part_of_one_that_counts(locked: list[int], forkers: dict[int, float]) -> None:
    """There is none, but a rank may say so, and put there what it has left out elsewhere."""
    known = replace(block(10.0, 20.0), locked_us=((3, 90.0),))
    mine = replace(block(0.0), locked_us=tuple((place, 90.0) for place in locked), gaps_us=((*[0.0] * 7, 675.0),))
    found = with_gaps(mine, known)
    assert {place: us - 50.0 for place, us in enumerate(found) if us > 50.0} == pytest.approx(
        {place: 675.0 - (50.0 if place in locked or place == 6 else 30.0) for place in forkers}
    )


def test_a_rank_that_waits_for_others_at_a_turnstile_does_not_pay_for_that() -> None:
    """It may be ahead of them where its calls wait for nobody."""
    said = [answer(50.0, gaps_us=[10.0, 310.0, 20.0, *[10.0] * 4, 0.0], span_us=780.0), answer(50.0, 10.0)]
    passage = Passage(2, 2, ((1, 2),) * RANKS, 90.0, (295.0, 3.0))
    found = BlockTimes.of(said, SLOTS, 1e4, passages=[passage])
    assert found.gaps_us == ((10.0, 15.0, 20.0, *[10.0] * 4, 0.0), (10.0, 7.0, *[10.0] * 5, 0.0))


def test_gaps_beside_locked_calls_are_free_where_the_reference_has_none_there() -> None:
    """Its locked call may be the first of a part."""
    mine = replace(block(0.0), locked_us=((2, 90.0),), gaps_us=((0.0, 500.0, 500.0, *[0.0] * 5),))
    assert with_gaps(mine, block(10.0, 20.0)) == mine.iterations_us


def test_a_locked_call_cannot_take_longer_than_the_outer_clock_saw() -> None:
    with pytest.raises(Rejected, match="integrity_failure") as caught:
        race(steady(slots=12, locks=True, locked_us=500.0, outer_us=90.0)).run(budget_s=10)
    assert "the events span 500 us, the outer clock saw 90 us" in caught.value.verdict.reason


def test_a_rank_without_work_may_report_no_time() -> None:
    idle, busy = (answer(us) for us in (0.0, 7.5))
    assert BlockTimes.of([busy, idle], SLOTS, 100.0).usual_us == 7.5


def test_a_failed_capture_leaves_the_rank_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.graph does not come back from its own stream when the capture cannot be ended."""
    stream = ["default"]
    monkeypatch.setattr(timed_block, "_timer", lambda **_: None)
    monkeypatch.setattr(timed_block, "_all_reduce", lambda _: None)
    monkeypatch.setattr(timed_block, "_synchronize", lambda: None)
    monkeypatch.setattr(timed_block, "_current_stream", lambda: stream[-1])
    monkeypatch.setattr(timed_block, "_set_stream", stream.append)

    def capture(self: timed_block.GraphBlock) -> None:
        stream.append("capturing")
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(timed_block.GraphBlock, "_capture", capture)
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="during capture"):
        timed_block.make_block("graph", lambda: None, [()], OutputRegions(torch.empty(1, dtype=torch.uint8), [], cpu), cpu)
    assert stream[-1] == "default"


class Captures:
    """Answers to ``prepare``, some of which fail."""

    def __init__(self, runner: FakeRunner, trusted: list[bool], other: list[bool]) -> None:
        self.runner, self.suspected = runner, False
        self.answers = {"trusted": iter(trusted), "other": iter(other)}
        self._trusted, self._other = runner.trusted, runner.ask
        runner.session.suspect_trusted = self.suspect  # type: ignore[attr-defined]
        runner.trusted, runner.ask = self.trusted, self.ask  # type: ignore[method-assign]

    def suspect(self) -> None:
        self.suspected = True

    def trusted(self, op: str, **more: Any) -> list[dict[str, Any]]:
        answer = self._trusted(op, **more)
        return answer if op != "prepare" or next(self.answers["trusted"], True) else [{"captured": False, "why": "of the reference"}]

    def ask(self, op: str, phase: str, deadline_s: float, **more: Any) -> list[dict[str, Any]]:
        answer = self._other(op, phase, deadline_s, **more)
        return answer if op != "prepare" or next(self.answers["other"], True) else [{"captured": False, "why": "of the candidate"}]


@pytest.mark.parametrize(
    ("trusted", "other", "why"),
    [
        ([True, False], [], "the reference could not be captured again: of the reference"),
        ([], [True, False], "cannot be captured: of"),
    ],
)
def test_a_failed_capture_is_told_of_the_side_that_failed(trusted: list[bool], other: list[bool], why: str) -> None:
    """Also when it is the second: graphs are captured anew between rounds."""
    runner = steady()
    captures = Captures(runner, trusted, other)
    speed = Benchmark(runner, ("graph",), RULES, None, (), 0.0)  # type: ignore[arg-type]
    speed.slots["graph"] = SLOTS
    speed.baselines["graph"] = race(steady(), side="reference", mode="graph")
    speed.baselines["graph"].run(budget_s=10)
    with pytest.raises(Unmeasurable, match=why):
        speed.measure("graph")
    assert captures.suspected == bool(trusted)


def test_a_few_slow_calls_of_the_reference_win_nothing_for_unequal_ones() -> None:
    """Which are scored by means: so are the reference's before."""
    baseline = race(steady(100.0, 100.0), side="reference")
    baseline.run(budget_s=10)
    runner = FakeRunner(itertools.repeat(uneven(2_500.0, 100.0)), itertools.repeat(uneven(730.0, 10.0)))
    run = race(runner, before=baseline)
    run.run(budget_s=10)
    assert run.score().by == "mean" and run.drift == pytest.approx(4.0)
    assert run.score().ratio.median == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("first_us", "second_us", "us", "speedup"),
    [(170.0, 100.0, 100.0, 1.0), (170.0, 105.0, 100.0, 1.033), (104.0, 170.0, 104.0, 103.3 / 104.0), (104.0, None, 104.0, 103.3 / 104.0)],
    ids=["fair", "fairer", "less fair", "too disturbed"],
)
def test_a_race_beside_which_the_reference_is_slower_is_run_once_more_and_the_fairer_counts(
    first_us: float, second_us: float | None, us: float, speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = race(steady(100.0, 100.0), side="reference", mode="graph")
    baseline.run(budget_s=10)
    speed = Benchmark(steady(), ("graph",), RULES, None, (), 0.0)  # type: ignore[arg-type]
    speed.slots["graph"], speed.baselines["graph"] = SLOTS, baseline
    runners, run_race = (
        iter([steady(first_us, us), second_us and steady(second_us, us if second_us < first_us else second_us)]),
        Benchmark._run_race,
    )

    def run_another(self: Benchmark, mode: Mode, baseline: Race) -> Race:
        self.runner = next(runners)  # type: ignore[assignment]
        if self.runner is None:
            raise Disturbed("by somebody")
        return run_race(self, mode, baseline)

    monkeypatch.setattr(Benchmark, "_run_race", run_another)
    assert measured(speed, "graph").speedup.median == pytest.approx(speedup)
    assert next(runners, None) is None


@pytest.mark.parametrize(("spread", "certain"), [(0.0, True), (0.3, False)], ids=["certain", "uncertain"])
def test_what_stays_uncertain_of_the_baseline_is_the_noise_floor(spread: float, certain: bool) -> None:
    """A rough one moves the speedup little, and hides little: two groups are known to lie about 1 % apart."""
    rules = replace(RULES, place_spread_us={"graph": 0.0})
    others_us = itertools.cycle([95.0, 95.0 * (1 + spread), 95.0])
    baseline = race(FakeRunner(itertools.repeat(100.0), others_us), side="reference", mode="graph", rules=rules)
    baseline.run(budget_s=10)
    speed = Benchmark(steady(100.0, 50.0), ("graph",), rules, None, (), 0.0)  # type: ignore[arg-type]
    speed.slots["graph"], speed.baselines["graph"] = SLOTS, baseline
    found = measured(speed, "graph")
    assert found.group_offset == baseline.score().ratio.median and found.faster
    if certain:
        assert found.noise_floor == 0.0 and found.speedup.median == pytest.approx(2.0 * 0.95)
    else:
        assert 0.01 < found.noise_floor <= 0.02 < baseline.score().ratio.half_width
        assert found.speedup.median == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("us", "half_width"), [(5.0, 0.0273), (10.0, 0.0176), (500.0, 0.0098)])
def test_where_graphs_lie_leaves_short_replays_uncertain(us: float, half_width: float) -> None:
    """Also where rounds agree to the last digit: by 0.11 us on either side over the root of 6 captures of the baseline, and of 9."""
    speeds = []
    for baseline_us in (us, 0.95 * us):
        baseline = race(steady(us, baseline_us), side="reference", mode="graph")
        baseline.run(budget_s=10)
        speed = Benchmark(steady(us, us), ("graph",), RULES, None, (), 0.0)  # type: ignore[arg-type]
        speed.slots["graph"], speed.baselines["graph"] = SLOTS, baseline
        speeds.append(measured(speed, "graph").speedup)
    alike, apart = speeds
    assert (alike.high - alike.low) / 2 == pytest.approx(half_width, rel=0.02)
    believed = math.log(apart.median) / math.log(0.95)
    assert believed == pytest.approx(1 / (1 + 2 * (0.11 / us / 0.01) ** 2 / 6), abs=0.03)


@pytest.mark.parametrize("where", ["probe", "group"])
def test_a_reference_that_is_not_captured_ends_the_baseline(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = steady()
    if where == "group":
        Captures(runner, [], [True, False])
        monkeypatch.setattr(Benchmark, "_probe", lambda self: {"eager": SLOTS, "graph": SLOTS})
    else:
        Captures(runner, [True, False], [])
        runner.layouts, runner.case = [], None  # type: ignore[attr-defined]
        runner.slot_bytes = 1.0  # type: ignore[attr-defined]
        monkeypatch.setattr("peerlane.evaluate.timing.benchmark.case_request", lambda case: {})
    speed = Benchmark(runner, ("eager", "graph"), RULES, None, (), 1e9)  # type: ignore[arg-type]
    speed.baseline()
    assert speed.broken and set(speed.unmeasurable) == {"graph"} and "could not be captured here" in speed.unmeasurable["graph"]
    assert set(speed.baselines) == ({"eager"} if where == "group" else set())


def test_a_block_s_size_is_found_in_the_slots_that_the_check_had_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = steady(slots=5)
    runner.layouts, runner.case, runner.slot_bytes = [], None, 1.0  # type: ignore[attr-defined]
    monkeypatch.setattr("peerlane.evaluate.timing.benchmark.case_request", lambda case: {})
    speed = Benchmark(runner, ("eager",), RULES, None, (), 1e12)  # type: ignore[arg-type]
    assert speed._probe()["eager"] >= RULES.min_slots
    assert {len(order) for order in runner.orders["trusted"]} == {5}
