"""The speed of one candidate on one case, in ranks of its own: the baseline before its code is loaded there, its own rounds after."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from peerlane.errors import HarnessError
from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected, verdict_of
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.timing.back_to_back import CALLS, LONGEST_BLOCK_S, WARM_UP_CALLS, BackToBackRounds
from peerlane.evaluate.timing.paired_rounds import CaptureFailed, PairedRounds
from peerlane.evaluate.timing.scoring import choose_calls
from peerlane.hardware.profiles import HardwareProfile
from peerlane.hardware.roofline import Peaks, physical_floor_us, roofline
from peerlane.results.record import Mode
from peerlane.results.speed_record import Estimate, ModeSpeed, Utilisation
from peerlane.results.verdict import IntegrityFailure
from peerlane.settings import Protocol, TimingRules

_PROBE_CALLS = 8
_FEWEST_CALLS, _MOST_CALLS = 4, 128  # per block: fewer leave no room for swaps, more take long to capture
_FEWEST_LONG_CALLS, _LONG_CALL_US = 2, 25_000.0  # so few are enough of calls that take so long: nothing is gained by working ahead
_MORE_CALLS = 4  # in graphs, than of an eager call's time fill a block: launches may take most of it
_BASELINE_SHARE = 0.4  # of the time there is
_ARENA_SHARE = 0.04  # of the GPU's memory, for a block's inputs, and as much for its outputs: candidates need the rest


def slots_to_time(quickest_s: float, rules: TimingRules) -> int:
    """Returns how many slots blocks may need, of a reference whose quickest call took so long: each has to be drawn, and costs memory."""
    enough = _MORE_CALLS * max(rules.min_block_us.values()) / max(1.0, 1e6 * quickest_s)
    return max(_PROBE_CALLS, min(_MOST_CALLS, math.ceil(enough)))


class Unmeasurable(Exception):
    """There is no speed in this mode; the message says why. ``group_lost``: the candidate's ranks are gone or in an unknown state.
    ``kind``: the verdict of a candidate that went wrong in this mode; empty where it could not be tried."""

    def __init__(self, why: str, *, kind: str = "", group_lost: bool = False) -> None:
        super().__init__(why)
        self.kind, self.group_lost = kind, group_lost


@dataclass
class Benchmark:
    """Times one case in several modes: :meth:`baseline` before ``load``, then :meth:`first_calls`, :meth:`measure` for each mode, and
    :meth:`record` when all are measured.

    ``runner`` has as many slots as :func:`slots_to_time` says. ``memory_bytes``: of the GPU of one rank. ``end``: when it has to be done,
    on the clock ``time.monotonic``: modes have fewer rounds then. ``unmeasurable``: the modes that are not tried, and why.
    ``broken``: a capture of the reference failed, so that the ranks are in a state that nobody knows; the mode is unmeasurable, and others
    are to be timed with fresh ranks. ``calls``: per block, by mode.

    Without a ``profile`` there is no utilisation, and no physical floor that times are held against.
    """

    runner: CaseRunner
    modes: tuple[Mode, ...]
    rules: TimingRules
    profile: HardwareProfile | None
    peaks: tuple[Peaks, ...]
    memory_bytes: float
    end: float = math.inf
    protocol: Protocol = "peerlane"
    baselines: dict[str, PairedRounds] = field(default_factory=dict)
    measured: dict[str, PairedRounds] = field(default_factory=dict)
    unmeasurable: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    long_calls: bool = False
    """A few calls fill a block, and leave nothing to be warmed up."""

    def baseline(self) -> None:
        """Lays the case out, chooses the blocks' sizes, and times reference against reference in every mode, unless it breaks."""
        problem, rules, runner = self.runner.problem, self.rules, self.runner
        for mode in set(self.modes) - set(problem.modes):
            self.unmeasurable[mode] = f"the reference cannot be captured: {problem.graph_reason}"
        runner.most_bytes, begin = _ARENA_SHARE * self.memory_bytes, time.monotonic()
        end = begin + _BASELINE_SHARE * (self.end - begin)
        runner.open()
        if self.protocol == "kittens":
            self.long_calls = True  # its blocks warm themselves up, and use all slots
            self._refuse_kittens()
        modes = sorted(set(self.modes) - set(self.unmeasurable))  # eager first
        probed = min(_PROBE_CALLS if runner.reference_s < _LONG_CALL_US / 1e6 else _FEWEST_LONG_CALLS, runner.slots)
        runner.generate_inputs(slots=probed)
        try:
            call_us = 0.0
            for mode in modes:
                if not self.long_calls:  # else the calls of the eager mode, which came first, will do
                    call_us = self._new_rounds(mode, "reference", calls=probed).probe_us()
                    self.long_calls = call_us >= _LONG_CALL_US
                fewest = min(_FEWEST_LONG_CALLS if self.long_calls else _FEWEST_CALLS, runner.slots)
                self.calls[mode] = choose_calls(call_us, rules.min_block_us[mode], runner.slots, fewest)
            self._call_every_slot("reference")
            for mode in modes:
                rounds = self._timed_rounds(mode, "reference")
                rounds.run(rules.baseline_s, end, warm=not self.long_calls)
                self.baselines[mode] = rounds
        except CaptureFailed as failure:
            self.unmeasurable[mode] = f"the reference could not be captured here: {failure}"
            self.broken = True

    def first_calls(self) -> None:
        """Lets the candidate set up what it sets up at first: handles, connections, workspaces, which cannot be set up in a capture."""
        self._call_every_slot("candidate")

    def _call_every_slot(self, side: wire.Side) -> None:
        if self.calls:
            runner, calls = self.runner, max(self.calls.values())
            runner.refresh_inputs(calls)
            begin = time.monotonic()
            runner.candidate.call(range(calls), "timing", runner.deadline(runner.session.deadlines.first_call, calls), side=side)
            runner.block_s = time.monotonic() - begin

    def measure(self, mode: Mode) -> None:
        """Measures the candidate, for :meth:`record`; raises :class:`Unmeasurable`, :class:`Rejected`, or GroupFailure.

        Failures that show only under graph replay do not make a kernel wrong that is right when it is called: the mode has failed.
        """
        if mode in self.unmeasurable:
            raise Unmeasurable(self.unmeasurable[mode])
        try:
            self._run_rounds(mode)
        except GroupFailure as failure:
            if mode == "eager" or failure.kind == "garbage":
                raise
            verdict = verdict_of(failure, self.runner.case)
            raise Unmeasurable(verdict.reason, kind=verdict.kind, group_lost=True) from None
        except Rejected as rejected:
            if mode == "eager" or isinstance(rejected.verdict, IntegrityFailure):
                raise
            raise Unmeasurable(rejected.verdict.reason, kind=rejected.verdict.kind) from None

    def profile_block(self, mode: Mode, marker: str, *, timeline: bool = False) -> list[wire.Recording]:
        """Runs a block of a mode that was measured under the profiler; returns every rank's recording, with all events if ``timeline``.

        Raises :class:`Rejected` or GroupFailure.
        """
        try:
            return self._new_rounds(mode, "candidate", calls=self.calls[mode]).profile_block(marker, timeline=timeline)
        except CaptureFailed as failure:
            if failure.trusted:
                raise HarnessError(f"the reference could not be captured again: {failure}") from None
            raise GroupFailure("runtime_error", "audit", f"was captured to be timed, but not to be audited: {failure}") from None

    def _new_rounds(self, mode: wire.LaunchMode, side: wire.Side, *, calls: int) -> PairedRounds:
        return PairedRounds(runner=self.runner, mode=mode, side=side, rules=self.rules, calls=calls)

    def _timed_rounds(self, mode: wire.LaunchMode, side: wire.Side) -> PairedRounds:
        if self.protocol == "kittens":
            return BackToBackRounds(runner=self.runner, mode=mode, side=side, rules=self.rules)
        return self._new_rounds(mode, side, calls=self.calls[mode])

    def _refuse_kittens(self) -> None:
        """Notes what the public protocol does not time: graphs, and references whose blocks would take too long."""
        self.unmeasurable["graph"] = "the public protocol has no graphs"
        if (block_s := self.runner.quickest_s * (WARM_UP_CALLS + CALLS)) > LONGEST_BLOCK_S:
            why = f"{WARM_UP_CALLS + CALLS} calls of the reference would take {block_s:.0f} s, which is more than {LONGEST_BLOCK_S:.0f} s"
            self.unmeasurable |= dict.fromkeys(self.modes, why)

    def slowdown(self, mode: str, rounds: PairedRounds) -> float:
        """The reference's time beside the candidate over its time before."""
        return rounds.reference_us() / self.baselines[mode].reference_us()

    def _run_rounds(self, mode: Mode) -> None:
        """Runs the rounds of a mode. Repeats them, if there is time, if the reference was slower beside the candidate than before; the less
        disturbed ones count."""
        tries: list[PairedRounds] = []
        begin = time.monotonic()
        end = begin + (self.end - begin) / max(1, len(set(self.baselines) - set(self.measured)))
        while len(tries) < 2 and not (tries and self.slowdown(mode, tries[-1]) <= 1 + self.rules.slowdown_limit[mode]):
            if tries and 2 * time.monotonic() - begin > end:
                break
            rounds = self._timed_rounds(mode, "candidate")
            try:
                rounds.run(self.rules.budget_s, end, warm=not self.long_calls)
            except CaptureFailed as failure:
                what = "the reference could not be captured again" if failure.trusted else "cannot be captured"
                raise Unmeasurable(f"{what}: {failure}") from None
            tries.append(rounds)
        self.measured[mode] = rounds = min(tries, key=lambda item: self.slowdown(mode, item))
        self._check_floor(rounds)

    def record(self, mode: Mode) -> ModeSpeed:
        rounds, slowdown = self.measured[mode], self.slowdown(mode, self.measured[mode])
        offset, candidate_us = self.baselines[mode].ratio(), rounds.other_us()
        slower = slowdown > 1 + self.rules.slowdown_limit[mode]
        # Of 69 references on two H200, the offset told nothing about the measurement that followed (correlation 0.05), and the correction
        # made their mean deviation from 1 half as large again. Of 64 on four ranks that share a GPU it took away a third of it.
        known = self.runner.session.place.shares_gpus and offset.half_width <= self.rules.offset_half_width
        # Eager calls of both sides depend on the host: of 117 honest evaluations on one H100, 7 had a reference that much slower.
        corrected = slower and mode == "graph"
        speedup = rounds.ratio().scaled((1 / offset.median if known else 1.0) * (1 / slowdown if corrected else 1.0))
        noise = offset.half_width if known else max(offset.high - 1, 1 - offset.low)
        floor = max(self.rules.target_half_width[mode], noise)
        if slower and not corrected:
            floor = (1 + floor) * slowdown - 1
        reference_us = candidate_us.scaled(speedup.median)
        return ModeSpeed(
            mode=mode,
            speedup=speedup,
            reference_us=reference_us,
            candidate_us=candidate_us,
            noise_floor=floor,
            group_offset=offset.median,
            group_offset_applied=known,
            reference_slowdown=slowdown,
            calls_per_block=rounds.calls,
            rounds=len(rounds.others),
            hand_off_us=rounds.hand_off_us,
            copies_us=rounds.copies_us,
            copies_launch_us=rounds.copies_launch_us,
            reference_blocks_us=tuple(round(block.events_us, 3) for block in rounds.references),
            candidate_blocks_us=tuple(round(block.events_us, 3) for block in rounds.others),
            reference_clock_us=tuple(round(block.clock_us, 3) for block in rounds.references),
            candidate_clock_us=tuple(round(block.clock_us, 3) for block in rounds.others),
            reference_launch_us=tuple(round(block.launch_us, 3) for block in rounds.references),
            candidate_launch_us=tuple(round(block.launch_us, 3) for block in rounds.others),
            utilisation=tuple(self._utilisation(peaks, reference_us, candidate_us) for peaks in self.peaks),
            flags=(*(("few_rounds",) if rounds.cut_short else ()), *(("slower_reference",) if slower else ())),
        )

    def _costs(self) -> list[Any]:
        case = self.runner.case
        return [self.runner.problem.cost(case, rank) for rank in range(case.world_size)]

    def _check_floor(self, rounds: PairedRounds) -> None:
        """Compares every block's time with what the hardware needs for its calls."""
        if self.profile is None:
            return
        floor_us = physical_floor_us(self._costs(), self.profile, calls=rounds.calls)
        fastest_us = min(max(block.events_us, block.clock_us - rounds.hand_off_us) for block in rounds.others)
        if fastest_us < floor_us:
            what = f"{rounds.calls} calls in {fastest_us:.1f} us; the hardware needs at least {floor_us:.1f} us"
            raise Rejected(IntegrityFailure(phase="timing", what=what))

    def _utilisation(self, peaks: Peaks, reference_us: Estimate, candidate_us: Estimate) -> Utilisation:
        assert self.profile is not None, "peaks come from a profile"
        bound = roofline(self._costs(), peaks)
        return Utilisation(
            ceilings=peaks.source,
            profile=self.profile.name,
            bound_us=bound.bound_us,
            bound_by=bound.bound_by,
            reference=bound.utilisation(reference_us.median),
            candidate=bound.utilisation(candidate_us.median),
        )
