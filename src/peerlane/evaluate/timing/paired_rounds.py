"""Rounds of one mode: a block of the trusted reference and one of the other side, paired, until the ratio is known well enough."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected
from peerlane.evaluate.correctness.slot_swaps import SlotSwaps, contents_at_calls
from peerlane.evaluate.timing.scoring import BlockTimes, Rounds
from peerlane.results.verdict import IntegrityFailure
from peerlane.settings import TimingRules

_ROUNDS_PER_LOOK = 3  # rounds after which the interval is computed again
_ROUNDS_PER_CAPTURE = 5  # rounds after which graphs are captured anew: how fast a graph is depends on its place in memory
_WARM_ROUNDS, _WARM_S = 3, 0.5
"""Rounds in which clocks, caches and connections become steady. After so many seconds fewer rounds are enough."""
_MIN_ROUNDS = 5  # rounds that there are even if they use up the budget: a round is long then, and its noise small
_MIN_LATE_ROUNDS = {"reference": 2, "candidate": 3}
"""Rounds by side that there are even if they use up a multiple of the budget, or the evaluation has no more time."""
_PATIENCE = 3.0  # times the budget after which so few rounds are enough
_PROBES, _PROBE_S = 3, 0.2  # blocks of a probe, and the seconds after which one block is enough
_JUDGING_S = 0.5  # seconds for comparing the outputs of all rounds: oracles may take longer than the calls
_RECHECKED_SHARE = 1 / 3  # of the blocks, after which the last output is compared again
_MIN_COMPARED, _MIN_SLOW_COMPARED = 2, 1
"""The r-th round compares an output with a chance of this over r at least; the second is for outputs that are slow to compare."""
_SLOW_JUDGING_S = 1.0  # seconds from which an output is slow to compare
_MIN_SAMPLED = 2  # outputs of the first round: so four ranks have their turns in three rounds
_USUAL_ROUNDS = 30
_HOPELESS = 1.5  # times the budget that the rounds would take to reach the target, by an estimate: more are not run
_MAX_WAITING_BYTES = 1 << 30  # of outputs that wait to be compared
_dice = random.SystemRandom()


class CaptureFailed(Exception):
    """A side's calls cannot be captured into a CUDA graph; the message says why. ``trusted``: it was the trusted reference's."""

    def __init__(self, why: str, *, trusted: bool) -> None:
        super().__init__(why)
        self.trusted = trusted


def draw_plan(calls: int, alike: list[int], swaps: int) -> wire.BlockPlan:
    """Draws random swaps before calls other than the first."""
    positions = _dice.sample(range(1, calls), min(swaps, calls - 1)) if swaps else []
    return wire.BlockPlan(calls, SlotSwaps.draw(range(calls), alike, positions).steps)


def draw_compared(plan: wire.BlockPlan) -> list[int]:
    """Draws the slots of a block that has ended whose outputs may be compared: those of swapped calls, the last one, and as many others."""
    swapped = {plan.calls - 1, *(slot for _, *pair in plan.swaps for slot in pair)}
    others = [slot for slot in range(plan.calls) if slot not in swapped]
    return sorted([*swapped, *_dice.sample(others, min(len(swapped), len(others)))])


@dataclass(kw_only=True)
class PairedRounds(Rounds):
    """``side``: ``reference`` (in the candidate's ranks, before candidate code is loaded) or ``candidate``."""

    runner: CaseRunner
    mode: wire.LaunchMode
    side: wire.Side
    rules: TimingRules
    cut_short: bool = False
    """There was too little time for the usual number of rounds."""
    _plan: wire.BlockPlan = field(init=False)
    _compared: int = 0
    """How many outputs of the candidate were compared so far."""
    _rounds_since: int = 0
    """How many rounds there were since the plan was drawn."""

    @property
    def slots(self) -> int:
        """Returns how many slots the calls of a block use."""
        return self.calls

    def run(self, budget_s: float, end: float = math.inf, *, warm: bool = True) -> None:
        """Warm-up, then rounds until the interval is narrow, the budget is spent, or it is ``end`` on the clock ``time.monotonic``. Raises
        :class:`CaptureFailed`, :class:`Rejected` and GroupFailure."""
        runner = self.runner
        runner.discard()
        runner.refresh_inputs(self.slots)
        self.prepare()
        begin = time.monotonic()
        for number in range(_WARM_ROUNDS if warm else 0):
            if number and time.monotonic() - begin > _WARM_S:
                break
            self._round(compared=False)
        begin = time.monotonic()
        while not self._knows_enough(time.monotonic() - begin, budget_s, late=time.monotonic() >= end):
            if self._rounds_since >= (_ROUNDS_PER_CAPTURE if self.mode == "graph" else 1):
                self.prepare()
            reference, other = self._round(compared=self.side == "candidate")
            self.references.append(reference)
            self.others.append(other)
            self._rounds_since += 1
        if self.side == "candidate":
            if (what := self.contradiction()) is not None:
                raise Rejected(IntegrityFailure(phase="timing", what=what))
            runner.judge("timing")

    def _knows_enough(self, passed_s: float, budget_s: float, *, late: bool = False) -> bool:
        count, min_rounds = len(self.others), min(_MIN_ROUNDS, self.rules.min_rounds)
        if late or passed_s >= budget_s:
            hurried = late or passed_s >= _PATIENCE * budget_s
            enough = count >= (min(_MIN_LATE_ROUNDS[self.side], min_rounds) if hurried else min_rounds)
            self.cut_short = enough and count < min_rounds
            return enough
        if count < self.rules.min_rounds or count % _ROUNDS_PER_LOOK:
            return False
        target = self.rules.offset_half_width if self.side == "reference" else self.rules.target_half_width[self.mode]
        half_width = self.ratio().half_width
        # The interval narrows with the square root of the rounds: where the budget cannot do, no more of it is spent.
        hopeless = count >= _USUAL_ROUNDS and passed_s * (half_width / target) ** 2 > _HOPELESS * budget_s
        return half_width <= target or hopeless

    def prepare(self) -> None:
        """Draws a new plan and has both sides build their blocks; graphs are captured and replayed once."""
        self._draw(self.rules.swaps)
        self._build()
        if self.mode == "graph":
            self.runner.trusted.warm_up_block()
            self.runner.trusted.undo_swaps()
            self.runner.candidate.warm_up_block(self._block_s)
        if not self.copies_us:
            answers = self.runner.trusted.time_copies()
            self.copies_us = max(answer.copies_us for answer in answers)
            self.copies_launch_us = min(answer.launch_us for answer in answers)

    def _draw(self, swaps: int) -> None:
        self._plan, self._rounds_since = draw_plan(self.calls, self.runner.alike, swaps), 0

    def _build(self) -> None:
        ours, theirs = self.runner.prepare_block(self.mode, self.side, self._plan)
        self._must_be_captured(ours, trusted=True)
        self._must_be_captured(theirs, trusted=False)

    def _must_be_captured(self, failures: list[str | None], *, trusted: bool) -> None:
        """Raises :class:`CaptureFailed` if a rank says that it could not build its block."""
        for failure in failures:
            if failure is not None:
                if trusted:
                    self.runner.session.suspect_trusted()
                raise CaptureFailed(failure, trusted=trusted)

    def probe_us(self) -> float:
        """The shortest time of a reference call in a few blocks of the trusted ranks alone; raises :class:`CaptureFailed`."""
        self._draw(0)
        self._must_be_captured(self.runner.trusted.prepare_block(self.mode, self._plan), trusted=True)
        times_us: list[float] = []
        while len(times_us) < _PROBES and sum(times_us) < _PROBE_S * 1e6:
            times_us.append(self._trusted_block(core=0).events_us)
        return min(times_us) / self.calls

    def profile_block(self, marker: str, *, timeline: bool) -> list[wire.Recording]:
        """Records a block of the candidate's on new contents, without swaps, and judges its outputs; returns every rank's recording."""
        runner = self.runner
        runner.refresh_inputs(self.calls)
        self._draw(0)
        self._build()
        limit_s = runner.deadline(runner.session.deadlines.first_call, self.calls)
        answers = runner.candidate.profile_block(self.calls, marker, limit_s, timeline=timeline)
        chosen = draw_compared(self._plan)
        if runner.samples_ranks:
            chosen = _dice.sample(chosen, 1)
        runner.collect_from([answer.outputs for answer in answers], chosen, "audit")
        runner.judge("audit")
        return [answer.recording for answer in answers]

    def _round(self, *, compared: bool) -> tuple[BlockTimes, BlockTimes]:
        """A block of each side in random order, on the same contents and the same core. A candidate gets new contents."""
        core, changeable = _dice.randrange(1 << 16), bool(self.runner.problem.changeable)
        refreshed = self.side == "candidate" or changeable
        if refreshed:
            self.runner.generate_inputs(slots=self.slots)
        if _dice.random() < 0.5:
            other = self._other_block(core, refreshed=refreshed, compared=compared)
            return self._trusted_block(core), other
        reference = self._trusted_block(core)
        if changeable:
            self.runner.generate_inputs(slots=self.slots)
        return reference, self._other_block(core, refreshed=refreshed, compared=compared)

    def _trusted_block(self, core: int) -> BlockTimes:
        trusted = self.runner.trusted
        trusted.ready_block(core)
        if self._plan.warm_up:
            trusted.warm_up_block()
        answers, clock_us = _timed(trusted.run_block)
        trusted.undo_swaps()
        return BlockTimes.of(answers, clock_us)

    def _other_block(self, core: int, *, refreshed: bool, compared: bool) -> BlockTimes:
        runner, limit_s = self.runner, self._block_s
        if refreshed:
            runner.publish_inputs(self.slots)
        runner.candidate.ready_block(core)
        if self._plan.warm_up:
            runner.candidate.warm_up_block(limit_s)
        answers, clock_us = _timed(lambda: runner.candidate.run_block(limit_s))
        ended = time.monotonic()
        times = BlockTimes.of(answers, clock_us)
        if compared:
            runner.count_collectives(answers)
            self._compare(ended)
        return times

    @property
    def _block_s(self) -> float:
        """Returns the timeout of a block of the other side."""
        return self.runner.deadline(self.runner.session.deadlines.calls, self._plan.calls + self._plan.warm_up)

    def _compare(self, ended: float) -> None:
        """Keeps outputs, to be judged after all rounds, or now where they are large. After some blocks, at random, the last output is
        looked at once more, for it must not change any more."""
        runner, chosen = self.runner, self._choose_compared()
        self._compared += len(chosen)
        if chosen:
            outputs = runner.candidate.describe_outputs(self.calls)
            contents = contents_at_calls(self._plan.swaps, self.calls)
            bytes_ = runner.collect_from(outputs, chosen, "timing", contents, [_dice.choice(chosen)])
            if bytes_ > _MAX_WAITING_BYTES:
                runner.judge("timing")
        if not self.others or _dice.random() < _RECHECKED_SHARE:
            runner.recheck_output(self.calls - 1, "timing", ended)

    def _choose_compared(self) -> Sequence[int]:
        """Returns slots drawn after the block, as many as can be judged in time and wait in little memory.

        The r-th round has one with a chance of 2/r at least, or 1/r where judging takes seconds, however long it takes: that is up to the
        candidate, too. Where only one rank's output is compared, every round has one until all ranks had their turn.
        """
        drawn, rounds = draw_compared(self._plan), len(self.others) + 1
        if self.runner.samples_ranks and (left := self.runner.case.world_size - self._compared) > 0:
            return sorted(_dice.sample(drawn, min(len(drawn), left, _MIN_SAMPLED if rounds == 1 else 1)))
        affordable = _JUDGING_S / _USUAL_ROUNDS / max(self.runner.judge_s, 1e-9)
        min_compared = _MIN_COMPARED if self.runner.judge_s < _SLOW_JUDGING_S else _MIN_SLOW_COMPARED
        affordable = max(affordable, min(1.0, min_compared / rounds))
        affordable = min(affordable, max(1.0, _MAX_WAITING_BYTES // max(1.0, self.runner.slot_bytes)))
        if affordable >= len(drawn):
            return drawn
        count = math.floor(affordable) + (_dice.random() < affordable % 1)
        return sorted(_dice.sample(drawn, min(count, len(drawn))))


def _timed(ask: Callable[[], list[wire.BlockRun]]) -> tuple[list[wire.BlockRun], float]:
    """The answers, and how long they took by this process's clock, in microseconds."""
    begin = time.perf_counter()
    answers = ask()
    return answers, (time.perf_counter() - begin) * 1e6
