"""Stress: calls that were right at rest, back to back and out of step. What is wrong only here is a race.

A pass calls the candidate once on every slot of freshly generated contents, with nothing between the calls. Before some of them a random
rank is held up, so that no two ranks stay in step by chance; a call's inputs are overwritten right behind it, so that a peer that reads
them late reads garbage; in some passes they get there only right before it, so that who reads them early reads those of another call. On
GPUs a trusted rank keeps one of them busy in some passes, so that kernels there are stopped in the middle while the others go on.
"""

import math
import random
import time
from dataclasses import dataclass

from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import CaseRunner
from peerlane.evaluate.correctness.slot_swaps import SlotSwaps
from peerlane.evaluate.messages import Request
from peerlane.evaluate.rank_interface import CandidateInterface
from peerlane.settings import StressRules

_SHARE_OF_BUDGET = 0.25  # one pass of a case may take so much of the time, so that there are several
_HOLDING_CALLS = 1 / 8
_FEWEST_PASSES = 2  # the second is a late one
_POISONED_CALLS = 1 / 2
_KEPT_CALLS = 1 / 5
_DELAYED_CALLS = 1 / 4  # before these, one rank waits
_SHORTEST_DELAY_US, _LONGEST_DELAY_US = 10.0, 10_000.0
_LATE_PASSES = 2 / 3  # of those behind the first two: in them every call's contents come to its slot right before it
_HOLDING_PASSES = 1 / 2  # on GPUs: there an eighth of the calls runs beside a kernel that holds SMs
# Of the passes on GPUs behind the first two, which tell how long one takes. Quick calls make four passes, so eight of nine cases have one.
_SLICED_PASSES = 2 / 3
# As long as the pass before took, within these: slices last milliseconds, and calls must meet the ends of some.
_SHORTEST_SLICING_S, _LONGEST_SLICING_S = 0.01, 0.04

_dice = random.SystemRandom()


def choose_slots(call_s: float, judge_s: float, rules: StressRules) -> int:
    """Calls per pass, such that input generation, calling and judging take a share of the time.

    ``judge_s``, which holds one input generation for every rank, stands for all that a slot costs besides its call.
    """
    in_time = _SHARE_OF_BUDGET * rules.budget_s / max(call_s + judge_s, 1e-9)
    return int(min(max(in_time, rules.min_slots), rules.max_slots))


def choose_compared(order: list[int], judge_s: float, rules: StressRules) -> list[int]:
    """The slots of a pass to be compared: all of them, or the last one and as many others, at random, as can be judged in time.

    One of the others is always among them: behind the last call nothing follows that could disturb it.
    """
    *others, last = order
    affordable = int(_SHARE_OF_BUDGET * rules.budget_s / max(judge_s, 1e-9))
    return sorted([last, *_dice.sample(others, min(max(1, affordable), len(others)))])


def draw_jitter(world_size: int, calls: int, *, on_gpu: bool) -> list[list[tuple[int, str, float]]]:
    """Returns the delays of every rank: ``(position of the call, way, us)``. See :class:`jitter.Jitter` for the ways."""
    plans: list[list[tuple[int, str, float]]] = [[] for _ in range(world_size)]
    shortest, longest = math.log(_SHORTEST_DELAY_US), math.log(_LONGEST_DELAY_US)
    holds_sms = on_gpu and _dice.random() < _HOLDING_PASSES

    def hold_up(position: int, ways: tuple[str, ...]) -> None:
        us = math.exp(_dice.uniform(shortest, longest))
        _dice.choice(plans).append((position, _dice.choice(ways), round(us, 1)))

    for position in range(calls):
        if _dice.random() < _DELAYED_CALLS:
            hold_up(position, ("host", "stream") if on_gpu else ("host",))
        if holds_sms and _dice.random() < _HOLDING_CALLS:
            hold_up(position, ("hold_sms",))
    return plans


def draw_time_slicing(passes: int, world_size: int, *, on_gpu: bool) -> int | None:
    """The rank whose GPU is shared in time slices during the pass that comes behind so many; None: no GPU is."""
    if not on_gpu or passes < _FEWEST_PASSES or _dice.random() >= _SLICED_PASSES:
        return None
    return _dice.randrange(world_size)


@dataclass
class Stress:
    """The stress of a case that ``runner`` has open, in which the candidate was right at rest: it knows what a call costs."""

    runner: CaseRunner
    rules: StressRules
    pass_s: float = 0.0
    """what the calls of the latest pass took that had all GPUs for itself"""

    def run(self, end: float) -> None:
        """Passes until ``rules.calls`` calls are done or time is up: ``end`` on the clock ``time.monotonic``. At least two, however slow.

        Raises :class:`Rejected` and GroupFailure.
        """
        runner = self.runner
        self.judge_s = runner.judge_s
        slots = min(runner.slots, choose_slots(runner.call_s, runner.judge_s, self.rules))
        order: list[int] = []
        passes = 0
        while self._goes_on(runner.evidence.stressed_calls, passes, end):
            late = passes == 1 or (passes > 1 and _dice.random() < _LATE_PASSES)
            if not late:  # else the order of the pass before: who has learned which slot comes next finds it so, and its contents changed
                order = _dice.sample(range(slots), slots)
            time_slicing = draw_time_slicing(passes, len(runner.layouts), on_gpu=runner.session.place.has_gpus)
            self._pass(runner, order, late=late, time_slicing=time_slicing)
            passes += 1

    def _goes_on(self, calls: int, passes: int, end: float) -> bool:
        last = end if calls >= self.rules.min_calls else end + self.rules.overtime_s
        return passes < _FEWEST_PASSES or (calls < self.rules.calls and time.monotonic() < last)

    def _pass(self, runner: CaseRunner, order: list[int], *, late: bool, time_slicing: int | None) -> None:
        """One pass over the slots in this order. In a ``late`` one contents come to their slots right before the calls; the GPU of the rank
        ``time_slicing`` is shared meanwhile, for as long as a pass takes that shares none.
        """
        runner.generate_inputs(mixed=True, slots=len(order))
        slot_swaps = SlotSwaps.draw(order, runner.alike, range(len(order)) if late else ())
        runner.publish_inputs(len(order))
        kept = [position for position in range(len(order)) if _dice.random() < _KEPT_CALLS]
        requests = self._requests(runner, order, slot_swaps, kept)
        busy_s = min(max(self.pass_s, _SHORTEST_SLICING_S), _LONGEST_SLICING_S)
        with runner.time_slicing(time_slicing, busy_s):
            begin = time.monotonic()
            outputs = runner.candidate.call_under_stress(requests, runner.deadline(runner.session.deadlines.calls, len(order)))
            ended = time.monotonic()
        if time_slicing is None:
            self.pass_s = ended - begin
        intact = {order[position] for position in [*kept, -1]}
        runner.collect_from(outputs, choose_compared(order, self.judge_s, self.rules), "stress", slot_swaps.contents, intact)
        runner.recheck_output(order[-1], "stress", ended)
        runner.judge("stress")
        runner.evidence.stressed_calls += len(order)

    def _requests(self, runner: CaseRunner, order: list[int], slot_swaps: SlotSwaps, kept: list[int]) -> list[Request[wire.Outputs]]:
        plans = draw_jitter(len(runner.layouts), len(order), on_gpu=runner.session.place.has_gpus)
        poisoned = [position for position in range(len(order)) if _dice.random() < _POISONED_CALLS]
        asked = CandidateInterface.call_under_stress
        return [Request(asked, runner.space, order, plan, poisoned, kept, slot_swaps.steps) for plan in plans]
