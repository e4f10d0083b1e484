"""The protocol of speed: paired rounds of reference and candidate, fresh contents for every block, an outer clock around each.

The reference is timed twice. Before candidate code is loaded, in the candidate's own ranks, alternating with the trusted group's
reference: that gives the ratio between the two places. Afterwards the candidate alternates with the trusted reference alone, which
tracks drift. The speedup is the product of the two paired ratios, the first shrunk towards 1 as far as it is uncertain, and what stays
uncertain of it then is the noise floor.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from peerlane.errors import HarnessError
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected
from peerlane.evaluate.correctness.slot_swaps import SlotSwaps
from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.results.verdict import IntegrityFailure
from peerlane.evaluate.timing.block_times import BlockTimes, locked_excess
from peerlane.evaluate.timing.cores import parts
from peerlane.evaluate.timing.scoring import Rounds
from peerlane.evaluate.timing.statistics import median_interval
from peerlane.evaluate.timing.turnstile import NOTHING_LOCKED, LockedCalls, Passage

_ROUNDS_PER_LOOK = 3  # at how narrow the interval is
_FEWEST_COMPARED = 2
_MANY = 1 << 20  # cores, far more than a rank has
_LATE_LOOKS, _BLOCKS_PER_LATE_LOOK = 1 / 3, 4  # the share of a candidate's blocks, and at the latest
_dice = random.SystemRandom()


class CaptureFailed(Exception):
    """A side's calls cannot be captured into CUDA graphs; the message says why. ``trusted``: it was the trusted reference's."""

    def __init__(self, why: str, *, trusted: bool) -> None:
        super().__init__(why)
        self.trusted = trusted


class Disturbed(HarnessError):
    """Something kept this node busy beside the reference, so that what a candidate claims cannot be checked."""


@dataclass(frozen=True)
class _Calls:
    """What a block of the other side is to be: its first core, the order of its slots, whether outputs are compared, of which, late
    changes, and locked calls. A slot may come more than once; what counts is then its last call.
    """

    core: int
    order: list[int]
    compared: bool
    chosen: list[int]
    slot_swaps: SlotSwaps
    locked: LockedCalls


def not_captured(answers: list[Message]) -> str | None:
    """Why a rank could not build its block, by the ranks' answers to ``prepare``."""
    return next((str(answer.get("why")) for answer in answers if not answer.get("captured")), None)


@dataclass(kw_only=True)
class Race(Rounds):
    """Timed rounds of one mode, in which a side alternates with the trusted reference.

    A block uses the first ``slots`` slots of the trial. What is usual here, the hand-off and an idle GPU's latency, comes from the
    reference's own race.

    Every block begins on cores that run at full speed, if there are any; both blocks of a round look for them in one order, drawn for
    the round, and so mostly have the same ones. Cores that are kept would differ between the sides by some per cent, round after round.
    """

    runner: CaseRunner
    slots: int
    slack_limit_us: float = math.inf
    latency_limit_us: float = math.inf
    usual_excess_us: float = math.inf
    usual_stretch_us: float = math.inf
    """by how much a stretch of the reference exceeded the events of as many of its blocks"""
    stretches_us: list[float] = field(default_factory=list)
    """of each stretch that only the outer clock timed, what a call took longer than the events say"""
    discarded: int = 0
    suspicious: int = 0
    _unlooked: int = 0
    _rounds_since: int = 0
    """the latest capture"""
    _due_s: float = 0.0
    """from when on there may be another"""

    @property
    def _parts(self) -> tuple[range, ...]:
        return tuple(parts(self.slots, self.rules.eager_parts)) if self.mode == "eager" else ()

    def _how(self, first_core: int, *, timed: bool) -> Message:
        """What a block's ranks are to know of cores, see :meth:`peerlane.evaluate.timing.cores.TimedCore.settle`, and of time."""
        cores = {"full_us": self.runner.session.full_pace_us, "first": first_core}
        return {"core": cores, "parts": self.rules.eager_parts, "timed": timed}

    def trusted_block(self, locked: int = 0, first_core: int = 0) -> BlockTimes:
        """One block of the trusted reference on what was generated, in which so many calls are locked, as on the other side."""
        order = self._new_order()
        answers, passages, outer_us = self._run_trusted(order, [], self.runner.lock(order, self._positions(locked)), first_core)
        session = self.runner.session
        session.full_pace_us = min([session.full_pace_us or math.inf, *(float(answer["pace_us"]) for answer in answers)])
        try:
            return BlockTimes.of(answers, self.slots, outer_us, self._shares, self._parts, passages)
        except GroupFailure as failure:
            raise HarnessError(f"the trusted reference cannot be timed: {failure.message}") from None

    def _run_trusted(
        self, order: list[int], steps: Sequence[tuple[int, int, int]], locked: LockedCalls, first_core: int, *, timed: bool = True
    ) -> tuple[list[Message], list[Passage], float]:
        """What the trusted ranks answer to a block in this order, and how long its locked calls, and all of it, take by the outer clock."""
        request = {"op": "block", "mode": self.mode, "order": order, "exchanges": steps, **self._how(first_core, timed=timed)}
        begin = time.perf_counter()
        answers, passages = self.runner.trusted_let_through(request, locked)
        return answers, passages, (time.perf_counter() - begin) * 1e6

    def other_block(self, calls: _Calls) -> BlockTimes:
        """One block of the other side on what was generated, published just before."""
        runner = self.runner
        answers, passages, outer_us = self._run_other(calls)
        ended = time.monotonic()
        times = BlockTimes.of(answers, self.slots, outer_us, self._shares, self._parts, passages)
        if self.side == "candidate":
            runner.hold_to(passages, calls.locked, "timing")
        latencies = [float(answer["latency_us"]) for answer in runner.trusted("latency")]
        if calls.compared:
            runner.count_collectives(answers)
            self._collect(answers, calls)
            if self._looks_again():
                runner.recheck_output(calls.order[-1], "timing", ended)
        return replace(times, idle_latency_us=max(latencies))

    def _looks_again(self) -> bool:
        """Whether to wait after this block for what comes late: after one of three at random, after one of four for certain. So nobody ever
        knows that it will not be waited for."""
        looks = self._unlooked + 1 == _BLOCKS_PER_LATE_LOOK or _dice.random() < _LATE_LOOKS
        self._unlooked = 0 if looks else self._unlooked + 1
        return looks

    def _run_other(self, calls: _Calls, *, timed: bool = True) -> tuple[list[Message], list[Passage], float]:
        """As :meth:`_run_trusted`, of the other side; what was generated is published just before."""
        runner = self.runner
        if self._needs_new_contents or calls.locked.calls:
            runner.publish_inputs(self.slots, calls.locked)
        request = {"op": "block", "mode": self.mode, "side": self.side, "order": calls.order, "exchanges": calls.slot_swaps.steps}
        requests = [{**request, **self._how(calls.core, timed=timed)}] * len(runner.layouts)
        begin = time.perf_counter()
        answers, passages = runner.let_through(runner.group, requests, calls.locked, "timing", runner.session.deadlines.timing)
        return answers, passages, (time.perf_counter() - begin) * 1e6

    def _collect(self, answers: list[Message], calls: _Calls) -> None:
        """Has the outputs of the chosen slots kept, to be judged when the race is over, or now where they would be too many. The inputs of
        one of them are looked at, which takes long where they are many."""
        if not calls.chosen:
            return
        looked_at = [_dice.choice(calls.chosen)]
        if self.runner.collect_from(answers, calls.chosen, "timing", calls.slot_swaps, looked_at) > self.rules.max_waiting_bytes:
            self.runner.judge("timing")

    def _new_order(self, passes: int = 1) -> list[int]:
        """The order in which a block uses its slots: another one every time, so that nobody can know the next slot beforehand."""
        return [slot for _ in range(passes) for slot in _dice.sample(range(self.slots), self.slots)]

    @property
    def _needs_new_contents(self) -> bool:
        """In every round. The reference against itself may go on with what it has, unless that is changed by calls."""
        return self.side == "candidate" or bool(self.runner.problem.changeable)

    def _draw_calls(self, *, compared: bool, passes: int = 1) -> _Calls:
        """A block, in which calls are locked if it is to be compared, or is the reference's; or a stretch of passes over all slots, where
        contents change places instead: a slot can be locked for one call only."""
        order = self._new_order(passes)
        locks = passes == 1 and (compared or self.side == "reference")  # whose own rounds tell what usually lies around such calls
        locked = self.runner.lock(order, self._positions(self.rules.locked_calls) if locks else ())
        chosen = self._chosen_slots(order[-1], list(locked.keys)) if compared else []
        slot_swaps = self.runner.slot_swaps(order, self._late_calls(order, chosen) if passes > 1 else ())
        return _Calls(_dice.randrange(_MANY), order, compared, chosen, slot_swaps, locked)

    def _positions(self, count: int) -> list[int]:
        """So many calls of a block, not the first, at random; no more than a third of them, or one."""
        return _dice.sample(range(1, self.slots), min(count, max(1, self.slots // 3)))

    def profile_block(self, marker: str) -> list[Message]:
        """A block of the candidate's on new contents, recorded instead of timed, its outputs judged; what the ranks answered.

        Raises :class:`CaptureFailed`."""
        runner = self.runner
        self._renew()
        self.prepare()
        self._renew()
        order = self._new_order()
        answers = runner.ask("profile_block", "audit", runner.session.deadlines.first_call, mode=self.mode, marker=marker, order=order)
        if chosen := self._chosen_slots(order[-1]):
            runner.collect_from(answers, chosen, "audit")
        runner.judge("audit")
        return answers

    def _renew(self) -> None:
        self.runner.generate_inputs(slots=self.slots)
        self.runner.publish_inputs(self.slots)

    def _round(self, *, warming: bool = False) -> tuple[BlockTimes, BlockTimes]:
        """A block of each side in random order, on the same contents. A candidate gets new ones, and but for warm-up is compared."""
        calls = self._draw_calls(compared=self.side == "candidate" and not warming)
        late = len(calls.locked.calls)
        if self._needs_new_contents:
            self.runner.generate_inputs(slots=self.slots)
        if _dice.random() < 0.5:
            other = self.other_block(calls)
            return self.trusted_block(late, calls.core), other
        reference = self.trusted_block(late, calls.core)
        if self.runner.problem.changeable:
            self.runner.generate_inputs(slots=self.slots)
        return reference, self.other_block(calls)

    def _chosen_slots(self, last: int, locked: Sequence[int] = ()) -> list[int]:
        """The slots of a block to be compared: a share of them at random, the last one and the locked ones, or as many at random as can be
        judged in time, half the time with a locked one among them: which these are is no secret, nor may the others be known to be none.

        Where even one per round is too many, some rounds have none; which, nobody knows beforehand. But however long judging takes, the
        first rounds have one, and the r-th with a chance of 2/r: how long it takes is up to the candidate, too. Comparison waits for the
        end of the race, so that neighbouring blocks stay close in time.
        """
        slots, rounds = self.slots, len(self.others) + self.discarded + len(self.stretches_us) + 1
        share = max(1, math.ceil(self.rules.compared_share * slots))
        affordable = self.rules.judging_s / self.rules.max_rounds / max(self.runner.judge_s, 1e-9)
        affordable = max(affordable, min(1.0, _FEWEST_COMPARED / rounds))
        if share + 1 <= affordable:
            return sorted({last, *locked, *_dice.sample(range(slots), share)})
        count = min(int(affordable) + (_dice.random() < affordable % 1), slots)
        first = _dice.sample(list(locked), 1) if locked and count and _dice.random() < 0.5 else []
        return sorted([*first, *_dice.sample([slot for slot in range(slots) if slot not in first], count - len(first))])

    def _late_calls(self, order: list[int], chosen: list[int]) -> list[int]:
        """Positions of calls, not the first, whose contents are to change places right before them: some of those that are compared."""
        compared = [position for position, slot in enumerate(order) if position and slot in chosen]
        return _dice.sample(compared, min(self.rules.late_changes, len(compared)))

    def _warm(self, budget_s: float) -> None:
        """Rounds until two neighbours agree on both sides: for at least ``warm_calls`` calls a side or ``warm_s``, and no longer than
        ``max_warm_calls`` calls or ``budget_s``.
        """
        rules, calls, last, begin = self.rules, 0, [math.inf, math.inf], time.monotonic()
        while calls < rules.max_warm_calls and time.monotonic() < begin + budget_s:
            now = [block.usual_us for block in self._round(warming=True)]
            calls += self.slots
            agree = all(abs(a - b) <= rules.warm_agreement[self.mode] * b for a, b in zip(now, last, strict=True))
            if agree and (calls >= rules.warm_calls or time.monotonic() >= begin + rules.warm_s):
                return
            last = now

    def _warm_graphs(self) -> None:
        """Replays every graph of one side, then of the other, on contents that are known already."""
        runner = self.runner
        runner.trusted("warm", mode=self.mode)
        runner.ask("warm", "timing", runner.session.deadlines.timing, mode=self.mode)

    def prepare(self) -> None:
        """Builds the blocks of both sides, at the same time; raises :class:`CaptureFailed`."""
        runner = self.runner
        ours, theirs = runner.prepare(self.mode, self.side)
        if (why := not_captured(ours)) is not None:
            runner.session.suspect_trusted()
            raise CaptureFailed(why, trusted=True)
        if (why := not_captured(theirs)) is not None:
            raise CaptureFailed(why, trusted=False)
        took_s = max(float(answer["took_s"]) for answer in ours)  # how long the other side takes is up to the candidate
        self.captures, self._rounds_since, self._due_s = self.captures + 1, 0, time.monotonic() + took_s

    def run(self, budget_s: float) -> None:
        """Warms both sides, then rounds until the interval is narrow or the budget is spent.

        Graphs are captured anew between rounds, see :attr:`_capture_is_due`.
        """
        self.captures, self.outputs = 0, self.runner.output_tensors
        self.runner.discard()
        self._renew()
        self.prepare()
        self._warm(budget_s)
        begin = time.monotonic()
        while not self._knows_enough(time.monotonic() - begin, budget_s):
            if self._capture_is_due:
                self.prepare()
                self._warm_graphs()
            self._keep(*self._round())
            self._rounds_since += 1
        if self.side == "reference":
            self._time_stretches()
            return
        self._refuse_disturbance()
        self._refuse_hidden_time()
        self._refuse_false_claims()
        self.runner.judge("timing")

    @property
    def _capture_is_due(self) -> bool:
        """Whether graphs are to be captured anew. How fast a kernel is launched by a graph depends on where the driver put that, to 0.4 us,
        which is much of a short call; a race is to see many such places, and its interval must show them. So once rounds have taken as
        long as capturing does, which is soon for short calls; for others it matters less, but they have a few captures, too."""
        if self.mode != "graph" or not self._rounds_since:
            return False
        return time.monotonic() >= self._due_s or self._rounds_since >= self.rules.rounds_per_capture

    def _knows_enough(self, passed_s: float, budget_s: float) -> bool:
        """Whether no round is needed any more. A candidate gets twice the usual number where they tell too little: on a busy host."""
        rules, count = self.rules, len(self.others)
        enough = rules.baseline_rounds if self.side == "reference" else rules.min_rounds[self.mode]
        if count < (enough if passed_s < rules.patience_s else rules.fewest_rounds):
            return False
        if self.side == "reference" or passed_s > budget_s:
            return True
        if count % _ROUNDS_PER_LOOK and count < 2 * rules.max_rounds:
            return False
        width, target = self._claimed_ratio().half_width, rules.target_half_width[self.mode]
        if width <= 2 * target:
            return width <= target or count >= rules.max_rounds or passed_s > rules.usual_s
        return count >= 2 * rules.max_rounds

    def _keep(self, reference: BlockTimes, other: BlockTimes) -> None:
        """Keeps the round unless its clocks disagree; too many such blocks on the candidate's side are no accident."""
        if impossible := [clocks for clocks in other.clocks_us if clocks[0] > 1.01 * clocks[1]]:
            what = "the events span {:.0f} us, the outer clock saw {:.0f} us".format(*impossible[0])
            if self.side == "reference":
                raise HarnessError(f"the reference cannot be timed here: {what}")
            raise Rejected(IntegrityFailure(phase="timing", what=what))
        doubt = self._doubt(other)
        if doubt is None and reference.slack_us <= self.slack_limit_us:
            self.references.append(reference)
            self.others.append(other)
            return
        if self.runner.session.wait_for_starts():
            return  # ranks were coming up meanwhile: no wonder
        self._discard()
        self.suspicious += doubt is not None
        if doubt is not None and self.suspicious > self.rules.max_rounds:
            raise Rejected(IntegrityFailure(phase="timing", what=doubt))

    def _discard(self) -> None:
        self.discarded += 1
        if self.discarded > 2 * self.rules.max_rounds:
            raise HarnessError(f"this node is too disturbed to time anything: {self.discarded} rounds in which the clocks disagree")

    def _doubt(self, block: BlockTimes) -> str | None:
        """Why a block of the other side does not count, if it does not."""
        if block.slack_us > self.slack_limit_us:
            usual = f"the hand-off here takes at most {self.slack_limit_us:.0f} us"
            return f"the outer clock runs {block.slack_us:.0f} us longer than the events; {usual}"
        if block.idle_latency_us > self.latency_limit_us:
            usual = f"at rest it takes at most {self.latency_limit_us:.0f} us"
            return f"a GPU is busy when the block is over: a tiny kernel takes {block.idle_latency_us:.0f} us; {usual}"
        return None

    def _refuse_disturbance(self) -> None:
        """What disturbs the reference's locked calls may be what lengthens the candidate's, or what is to hide how long these are. Nobody
        is accused: any process of this machine may do that."""
        if (unexplained_us := self.unexplained_us) > 0:
            raise Disturbed(
                "this node is too disturbed to hold claims against the outer clock: beside the candidate "
                f"{self.around_us():.0f} us lie around a locked call of the reference, and {self.usual_around_us():.0f} us did before, "
                f"{unexplained_us:.0f} us more than varies; run it again on a machine that nobody else keeps busy"
            )

    def _refuse_hidden_time(self) -> None:
        """A single block's hand-off may be long by chance; that of the usual block, beside the reference's of the same round, may not."""
        excess, limit = self.excess_us(), self.usual_excess_us + self.rules.hidden_us
        if excess.low > limit:
            what = (
                f"in the usual block the outer clock exceeds the events by {excess.median:.0f} us more than in the reference's next to it; "
                f"{limit:.0f} us is the most"
            )
            raise Rejected(IntegrityFailure(phase="timing", what=what))

    def _refuse_false_claims(self) -> None:
        """Holds what the events claim against the outer clock around locked calls, and around stretches of calls, so long that a hand-off
        is little. Only a candidate that claims to be faster is asked."""
        if self._claimed_ratio().low <= 1:
            return
        self._refuse_hidden_calls()
        if passes := self._stretch_passes:
            self._refuse_short_spans(passes)

    @property
    def _stretch_passes(self) -> int:
        """Over all slots, in a stretch; 0 where a block is long enough, and where calls change inputs."""
        calls = min(math.ceil(self.rules.stretch_us[self.mode] / self._usual_us), self.rules.max_stretch_calls)
        return -(-calls // self.slots) if calls > self.slots and not self.runner.problem.changeable else 0

    def _time_stretches(self) -> None:
        """By how much more than its events say some of the reference's take, which is little: those beside the candidate's may take little
        longer."""
        if passes := self._stretch_passes:
            count, late = self.rules.baseline_stretches[self.mode], self.rules.late_changes
            self.usual_stretch_us = max(0.0, *(self._trusted_stretch(passes, late, _dice.randrange(_MANY)) for _ in range(count)))

    def _trusted_stretch(self, passes: int, late: int, core: int) -> float:
        """How much longer the reference's calls of so many passes over all slots take than the race's events say."""
        order = self._new_order(passes)
        steps = self.runner.slot_swaps(order, _dice.sample(range(1, len(order) - 1), late)).steps
        *_, outer_us = self._run_trusted(order, steps, NOTHING_LOCKED, core, timed=False)
        return outer_us - passes * statistics.median(block.span_us for block in self.references)

    def _refuse_short_spans(self, passes: int) -> None:
        """In a stretch slots are used again. What a candidate computed for one is no answer any more once the slot has exchanged its
        contents with another."""
        rules, calls, excess = self.rules, passes * self.slots, self.stretches_us
        known, claimed = (median_interval([block.span_us / self.slots for block in blocks]) for blocks in (self.references, self.others))
        share_us = rules.hidden_share * known.median  # of a call, and what passes behind it
        unsure_us = (1 - known.low / known.median) * (known.median + claimed.median)  # what a candidate's own say is up to it
        limit_us = (self.usual_excess_us + rules.hidden_us) / calls + share_us + min(unsure_us, share_us)
        longest_us = self.usual_stretch_us + rules.hidden_us + rules.drift_share[self.mode] * calls * known.median
        taken_us = list[float]()

        def in_doubt() -> bool:
            return statistics.median(excess) > limit_us or statistics.median(taken_us) > longest_us

        while len(excess) < rules.min_stretches or (in_doubt() and len(excess) < rules.max_stretches):
            other_us, reference_us = self._stretch(passes)
            taken_us.append(reference_us)
            excess.append((other_us - reference_us) / calls)
        if statistics.median(taken_us) > longest_us:  # who disturbs the reference would hide as much of its own
            raise Disturbed(
                f"this node is too disturbed to hold claims against the outer clock: {calls} calls of the reference behind each other take "
                f"{statistics.median(taken_us) / 1e3:.1f} ms longer beside the candidate than their events say, and "
                f"{self.usual_stretch_us / 1e3:.1f} ms did before; run it again on a machine that nobody else keeps busy"
            )
        if median_interval(excess).low > limit_us:
            what = (
                f"{calls} calls behind each other take {statistics.median(excess):.1f} us each longer than the events of such calls say, "
                f"next to the reference's; {limit_us:.1f} us is the most"
            )
            raise Rejected(IntegrityFailure(phase="timing", what=what))

    def _stretch(self, passes: int) -> tuple[float, float]:
        """How much longer the calls of so many passes over all slots take than the race's events say, and the reference's next to them."""
        self.runner.generate_inputs(slots=self.slots)
        drawn = self._draw_calls(compared=True, passes=passes)
        trusted = functools.partial(self._trusted_stretch, passes, len(drawn.slot_swaps.steps), drawn.core)
        if first := _dice.random() < 0.5:
            reference_us = trusted()
        answers, _, other_us = self._run_other(drawn, timed=False)
        self._collect(answers, drawn)
        if not first:
            reference_us = trusted()
        return other_us - passes * statistics.median(block.span_us for block in self.others), reference_us

    def _refuse_hidden_calls(self) -> None:
        """What a locked call takes is known by the outer clock."""
        excess, limit_us = locked_excess(self.references, self.others), self._locked_limit_us
        if excess is not None and excess.low > limit_us:
            what = (
                f"locked calls take {excess.median:.1f} us longer by the outer clock than their events say, next to the reference's; "
                f"{limit_us:.1f} us is the most"
            )
            raise Rejected(IntegrityFailure(phase="timing", what=what))
