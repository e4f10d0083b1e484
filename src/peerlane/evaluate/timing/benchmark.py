"""The speed of one candidate on one case, in ranks of its own: the baseline before its code is loaded there, the race after."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from peerlane.errors import HarnessError
from peerlane.evaluate.correctness.case_runner import CaseRunner, Rejected, verdict_of
from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import case_request
from peerlane.evaluate.results.record import Mode
from peerlane.evaluate.results.speed_record import Estimate, ModeSpeed, Utilisation
from peerlane.evaluate.results.verdict import CaseEvidence, IntegrityFailure
from peerlane.evaluate.timing.block_times import choose_slots
from peerlane.evaluate.timing.speed import CaptureFailed, Disturbed, Race, not_captured
from peerlane.evaluate.timing.statistics import Interval
from peerlane.hardware.profiles import HardwareProfile
from peerlane.hardware.roofline import Peaks, physical_floor_us, roofline
from peerlane.settings import TimingRules

_PROBE_BLOCKS = 3
_PROBE_S = 0.1  # a block that takes longer is enough


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

    ``unmeasurable``: the modes that are not tried, and why. ``broken``: a capture of the reference failed, so that the ranks are in a state
    that nobody knows; the mode is unmeasurable, and others are to be timed with fresh ranks. ``slots``: calls per block, by mode.

    Without a ``profile`` there is no utilisation, and no physical floor that times are held against.
    """

    runner: CaseRunner
    modes: tuple[Mode, ...]
    rules: TimingRules
    profile: HardwareProfile | None
    peaks: tuple[Peaks, ...]
    memory_bytes: float
    baselines: dict[str, Race] = field(default_factory=dict)
    races: dict[str, Race] = field(default_factory=dict)
    unmeasurable: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    slots: dict[str, int] = field(default_factory=dict)

    def baseline(self) -> None:
        """Chooses the block's size, lays the case out, and times reference against reference in every mode, unless it breaks."""
        problem = self.runner.problem
        for mode in set(self.modes) - set(problem.modes):
            self.unmeasurable[mode] = f"the reference cannot be captured: {problem.graph_reason}"
        self.slots = self._probe()
        if self.broken:
            return
        self.runner.slots = max(self.slots.values())
        self.runner.open()
        self._call_every_slot("reference")
        for mode in sorted(set(self.modes) - set(self.unmeasurable)):  # eager first
            race = self._new_race(mode, "reference")
            try:
                race.run(self.rules.budget_s)
            except CaptureFailed as failure:
                self._break(mode, str(failure))
                return
            self.baselines[mode] = race

    def _break(self, mode: str, why: str) -> None:
        self.unmeasurable[mode] = f"the reference could not be captured here: {why}"
        self.broken = True

    def first_calls(self) -> None:
        """Lets the candidate set up what it sets up at first: handles, connections, workspaces, which cannot be set up in a capture."""
        self._call_every_slot("candidate")

    def _call_every_slot(self, side: str) -> None:
        runner = self.runner
        runner.generate_inputs()
        runner.publish_inputs()
        runner.ask("call", "timing", runner.session.deadlines.first_call, side=side, slots=list(range(runner.slots)))

    def _probe(self) -> dict[str, int]:
        """Calls per block in each mode, from a few short blocks of the trusted reference, in as many slots as there was memory for when
        the case was checked."""
        runner = self.runner
        runner.layouts = runner.trusted("open_case", slots=runner.slots, **case_request(runner.case))
        times: dict[str, float] = {}
        for mode in runner.problem.modes:
            if mode in self.unmeasurable:
                continue
            runner.generate_inputs()
            if (why := not_captured(runner.trusted("prepare", mode=mode))) is not None:
                runner.session.suspect_trusted()
                self._break(mode, why)
                continue
            times[mode] = self._shortest_call_us(Race(runner=runner, mode=mode, side="reference", rules=self.rules, slots=runner.slots))
        slots = {
            mode: choose_slots(times["eager"], us, runner.slot_bytes, self.memory_bytes, self.rules, mode) for mode, us in times.items()
        }
        runner.trusted("close_case")
        return slots

    @staticmethod
    def _shortest_call_us(race: Race) -> float:
        end, times = time.monotonic() + _PROBE_S, [race.trusted_block().usual_us]
        while len(times) < _PROBE_BLOCKS and time.monotonic() < end:
            times.append(race.trusted_block().usual_us)
        return min(times)

    def measure(self, mode: Mode) -> None:
        """Races the candidate, for :meth:`record`; raises :class:`Unmeasurable`, :class:`Rejected`, or GroupFailure.

        Failures that show only under graph replay do not make a kernel wrong that is right when it is called: the mode has failed.
        """
        if mode in self.unmeasurable:
            raise Unmeasurable(self.unmeasurable[mode])
        try:
            self._race(mode)
        except GroupFailure as failure:
            if mode == "eager" or failure.kind == "garbage":
                raise
            verdict = verdict_of(failure, self.runner.case)
            raise Unmeasurable(verdict.reason, kind=verdict.kind, group_lost=True) from None
        except Rejected as rejected:
            if mode == "eager" or isinstance(rejected.verdict, IntegrityFailure):
                raise
            raise Unmeasurable(rejected.verdict.reason, kind=rejected.verdict.kind) from None

    def profile_block(self, mode: Mode, marker: str) -> list[Message]:
        """A block of a mode that was measured, under the profiler; what the ranks answered. Raises :class:`Rejected` or GroupFailure."""
        try:
            return self._new_race(mode, "candidate").profile_block(marker)
        except CaptureFailed as failure:
            if failure.trusted:
                raise HarnessError(f"the reference could not be captured again: {failure}") from None
            raise GroupFailure("runtime_error", "audit", f"was captured to be timed, but not to be audited: {failure}") from None

    def _new_race(self, mode: str, side: str, **more: Any) -> Race:
        return Race(runner=self.runner, mode=mode, side=side, rules=self.rules, slots=self.slots[mode], **more)

    def _run_race(self, mode: Mode, baseline: Race) -> Race:
        race = self._new_race(
            mode,
            "candidate",
            slack_limit_us=3 * baseline.slack_us + 5_000,
            latency_limit_us=5 * baseline.idle_latency_us + 500,
            usual_excess_us=max(0.0, baseline.excess_us().high),
            usual_stretch_us=baseline.usual_stretch_us,
            before=baseline,
        )
        try:
            race.run(self.rules.budget_s)
        except CaptureFailed as failure:
            what = "the reference could not be captured again" if failure.trusted else "cannot be captured"
            raise Unmeasurable(f"{what}: {failure}") from None
        return race

    def _run_fair_race(self, mode: Mode, baseline: Race) -> Race:
        """A race beside which the reference was not disturbed, if one of two is; else that beside which it was less. Raises
        :class:`Disturbed` where both are too disturbed to hold anything against."""
        races: list[Race] = []
        for last in (False, True):
            try:
                races.append(self._run_race(mode, baseline))
            except Disturbed:  # for a while, perhaps
                if last and not races:
                    raise
            else:
                if races[-1].counted == 1.0:
                    break
        return max(races, key=lambda race: race.counted)

    def _race(self, mode: Mode) -> None:
        self.races[mode] = race = self._run_fair_race(mode, self.baselines[mode])
        self._check_floor(race)
        if mode == "graph" and "eager" in self.races:
            self.races["eager"].replayed_us = race.score().times_us.median

    def record(self, mode: Mode) -> ModeSpeed:
        """What is stored of a mode that was measured: eager calls are held against their graphs."""
        baseline, race = self.baselines[mode], self.races[mode]
        known, score = baseline.score(), race.score()
        between_races = Interval.about_one(self.rules.race_spread[mode])
        group_offset = (known.ratio * baseline.graphs_apart()).shrunk(self.rules.group_offset_spread)
        speedup = score.ratio * race.graphs_apart() * between_races * _inverse(group_offset)
        reference_us, candidate_us = known.times_us, score.times_us
        return ModeSpeed(
            mode=mode,
            speedup=_estimate(speedup),
            reference_us=_estimate(candidate_us.scaled(speedup.median)),
            candidate_us=_estimate(candidate_us),
            noise_floor=group_offset.half_width,
            group_offset=known.ratio.median,
            group_offset_applied=True,
            reference_slowdown=race.drift,
            calls_per_block=race.slots,
            rounds=len(race.others),
            reference_blocks_us=tuple(round(block.span_us, 3) for block in race.references),
            candidate_blocks_us=tuple(round(block.span_us, 3) for block in race.others),
            reference_clock_us=tuple(round(block.outer_us, 3) for block in race.references),
            candidate_clock_us=tuple(round(block.outer_us, 3) for block in race.others),
            flags=("slower_reference",) if race.counted < 1 else (),
            utilisation=tuple(self._utilisation(peaks, reference_us, candidate_us) for peaks in self.peaks),
        )

    def _costs(self) -> list[Any]:
        case = self.runner.case
        return [self.runner.problem.cost(case, rank) for rank in range(case.world_size)]

    def _check_floor(self, race: Race) -> None:
        """Holds every block against what the hardware can do: all its calls together, and the middle one alone."""
        if self.profile is None:
            return
        costs = self._costs()
        for calls, times_us in (
            (len(race.others[0].counted_us), [sum(block.counted_us) for block in race.others]),
            (1, [block.usual_us for block in race.others]),
        ):
            floor_us = physical_floor_us(costs, self.profile, calls=calls)
            if min(times_us) < floor_us:
                what = f"{calls} call(s) in {min(times_us):.1f} us; the hardware needs at least {floor_us:.1f} us"
                raise Rejected(IntegrityFailure(phase="timing", what=what))

    def _utilisation(self, peaks: Peaks, reference_us: Interval, candidate_us: Interval) -> Utilisation:
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

    def merged(self, checked: CaseEvidence) -> CaseEvidence:
        """The case's evidence from correctness and timing together."""
        timed = self.runner.evidence
        return checked.model_copy(
            update={
                "slots": checked.slots + timed.slots,
                "timed_slots": timed.timed_slots,
                "max_error_over_tolerance": max(
                    checked.max_error_over_tolerance, timed.max_error_over_tolerance if timed.max_error_over_tolerance <= 1 else 0.0
                ),
            }
        )


def _inverse(interval: Interval) -> Interval:
    return Interval(1 / interval.median, 1 / interval.high, 1 / interval.low, interval.n)


def _estimate(interval: Interval) -> Estimate:
    return Estimate(median=interval.median, low=interval.low, high=interval.high, n=interval.n)
