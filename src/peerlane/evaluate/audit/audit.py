"""Audited calls: a few calls of a candidate under the profiler, what ran in them, and what a track says to it.

The calls are ordinary ones on fresh contents, at slots chosen at random after all of them have been called before, so that set-up is over;
their outputs are judged like any others. On GPUs a whole block of every timed mode is recorded too. Because a profiler leaves traces in the
process, all this comes after timing.
"""

import random
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peerlane.common.place import Place
from peerlane.evaluate import wire
from peerlane.evaluate.audit import monkeypatch_check, recorder
from peerlane.evaluate.audit.activity import Activity, activity, kernel_kind, most_per_call
from peerlane.evaluate.audit.library import library_kernels
from peerlane.evaluate.audit.mechanisms import LoadedKernel, loaded_kernels, mechanisms
from peerlane.evaluate.correctness.case_runner import CaseRunner
from peerlane.evaluate.messages import Request
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.rank_interface import CandidateInterface
from peerlane.evaluate.timing.benchmark import Benchmark
from peerlane.evaluate.wire import NAME_CHARACTERS
from peerlane.results.record import Mode
from peerlane.results.result import Audit, Mechanism
from peerlane.results.verdict import IntegrityFailure, TrackViolation

_SLOTS, _SLOW_SLOTS = 4, 2  # so few where comparing takes long
_MOST_CHOICES = 16
_MOST_NAMES_KEPT = 32  # of kernels, and of operators, in a record
_OWN = "peerlane."
_LEAST_FUNCTIONS = len(monkeypatch_check.functions_of(monkeypatch_check, recorder))
"""that a rank compares with what they were: it has more modules than these, which every rank has"""
CUSTOM_RULE = "in the custom track a call's communication must be the candidate's own"


def library_violation(kernels: Iterable[str]) -> TrackViolation:
    """Returns what the custom track says of kernels of the kit's library."""
    return TrackViolation(what=f"{', '.join(sorted(kernels)[:4])}: kernels of the device kit's library were loaded; {CUSTOM_RULE}")


@dataclass
class Auditor:
    """The reports of one candidate's ranks on their audited calls. They are not believed more than that: see docs/tracks.md.

    Attributes:
        place: where the ranks run.
        calls: one span for every rank and audited call.
        blocks: one span for every rank and recorded block, without what copying outputs may have added.
        unrecorded_collectives: those that process groups counted in calls that were not recorded, once set-up was over.
        faults: signs that the profiler or the evaluator's own functions were interfered with.
        monkeypatches: those of them that say so of the evaluator's.
    """

    place: Place
    calls: list[Activity] = field(default_factory=list)
    audited: int = 0
    blocks: list[Activity] = field(default_factory=list)
    block_modes: list[Mode] = field(default_factory=list)
    unrecorded_collectives: int = 0
    faults: list[str] = field(default_factory=list)
    monkeypatches: list[str] = field(default_factory=list)
    loaded: list[LoadedKernel] = field(default_factory=list)
    choices: tuple[str, ...] = ()
    library: set[str] = field(default_factory=set)
    """kernels of the kit's library that were loaded"""
    team_collectives: list[str] = field(default_factory=list)
    """collectives of NVSHMEM's teams that the candidate's source calls"""

    def audit_calls(self, runner: CaseRunner, *, called: int = 0) -> None:
        """Calls slots, then the same again on new contents, some of them under the profiler; raises Rejected for wrong outputs. The case
        is open. ``called``: how many slots have been called before. Where comparing takes long, these are not called twice."""
        slots, dice = range(min(runner.slots, _SLOW_SLOTS if runner.samples_ranks else _SLOTS)), random.SystemRandom()
        audited = dice.sample(slots, dice.randint(1, max(1, len(slots) - 1)))
        limit_s = runner.session.deadlines.first_call
        runner.discard()
        if called < len(slots) or not runner.samples_ranks:
            runner.refresh_inputs(len(slots), mixed=True)
            runner.check("audit", limit_s, slots)
        runner.refresh_inputs(len(slots), mixed=True)
        unrecorded = [0] * runner.case.world_size
        for slot in slots:
            marker = secrets.token_hex(16) if slot in audited else None
            for rank, answer in enumerate(runner.check("audit", limit_s, [slot], marker=marker)):
                self.calls += [self._take(rank, recording, marker or "") for recording in answer.recordings]
                unrecorded[rank] += answer.collectives - sum(recording.collectives for recording in answer.recordings)
        self.unrecorded_collectives = max(self.unrecorded_collectives, *unrecorded)
        self.audited += len(audited)

    def audit_block(self, speed: Benchmark, mode: Mode) -> None:
        """Records a block of a timed mode, which judges its outputs and keeps no times; raises Rejected for wrong outputs."""
        marker = secrets.token_hex(16)
        for rank, recording in enumerate(speed.profile_block(mode, marker)):
            self.blocks.append(self._take(rank, recording, marker, calls=speed.calls[mode]).without_snapshots())
        self.block_modes.append(mode)

    def look_at_code(self, runner: CaseRunner) -> None:
        """Asks what device code the ranks have loaded; one rank disassembles libraries."""
        answers = runner.candidate.list_loaded_code()
        for answer in answers:
            self.loaded += loaded_kernels(answer.kernels)
            self.library |= {name for tokens in answer.sources if (name := library_kernels().get(tokens)) is not None}
        self.choices = tuple(choice[:NAME_CHARACTERS] for choice in answers[0].choices[:_MOST_CHOICES])

    def _take(self, rank: int, recording: wire.Recording, marker: str, calls: int = 1) -> Activity:
        """Notes the faults of a recording; returns what ran in it."""
        if recording.replaced:
            names = sorted(recording.replaced, key=lambda name: not name.startswith(_OWN))
            self.faults.append(f"replaced on rank {rank}: {', '.join(names[:4])}")
            if names[0].startswith(_OWN):
                self.monkeypatches.append(self.faults[-1])
        elif recording.functions < _LEAST_FUNCTIONS:
            self.faults.append(
                f"rank {rank} compared {recording.functions} functions of the evaluator with what they were: expected at least "
                f"{_LEAST_FUNCTIONS}, so the list was emptied"
            )
            self.monkeypatches.append(self.faults[-1])
        elif sorted(recording.marks) != [f"{marker}:begin", f"{marker}:end"]:
            self.faults.append(
                f"the marks at the ends of an audited call are not in its record on rank {rank}: the profiler was interfered with"
            )
        return activity(recording.host, recording.device, calls)

    def count_timed(self, collectives: int) -> None:
        """Takes in what process groups counted in timed blocks, none of which are recorded."""
        self.unrecorded_collectives = max(self.unrecorded_collectives, collectives)

    @property
    def saw_nothing(self) -> bool:
        """True if no rank was seen to do anything: on a GPU, anything on the device."""
        return not any(_shows_work(item, self.place) for item in self.calls)

    @property
    def integrity_failure(self) -> IntegrityFailure | None:
        """Returns the objection to what is allowed in no track."""
        return IntegrityFailure(phase="audit", what=self.monkeypatches[0]) if self.monkeypatches else None

    def violation(self, *, must_move: bool) -> IntegrityFailure | TrackViolation | None:
        """Returns what the custom track objects to. ``must_move``: the answer cannot be had without bytes from another rank."""
        if self.faults:
            return IntegrityFailure(phase="audit", what=self.faults[0])
        for spans, where in ((self.calls, "an audited call"), (self.blocks, "an audited block")):
            if names := sorted({name for item in spans for name in item.forbidden()}):
                return TrackViolation(what=f"{', '.join(names[:4])} ran in {where}; {CUSTOM_RULE}")
        if self.library:
            return library_violation(self.library)
        if self.team_collectives:
            return TrackViolation(what=f"{', '.join(self.team_collectives[:4])}: collectives of NVSHMEM's teams are called; {CUSTOM_RULE}")
        if self.unrecorded_collectives:
            return TrackViolation(
                what=f"process groups counted {self.unrecorded_collectives} collectives in calls that were not recorded; {CUSTOM_RULE}"
            )
        if must_move and self.saw_nothing:
            return TrackViolation(
                what="the audit saw nothing run on any rank, though the problem needs bytes from other ranks: nothing shows whose they were"
            )
        return None

    def record(self) -> Audit | None:
        """Returns the audit for the result; None if no call was audited."""
        if not self.audited:
            return None
        triton = {kernel.name for kernel in self.loaded if kernel.origin == "triton"}
        spans = [*self.calls, *self.blocks]
        calls = [item.calls for item in spans]
        names: Counter[str] = sum((item.kernels for item in spans), Counter())
        return Audit(
            calls=self.audited,
            block_modes=tuple(self.block_modes),
            kernels=most_per_call([_by_kind(item.kernels, triton) for item in spans], calls),
            copies=most_per_call([item.copies for item in spans], calls),
            memsets=max(item.memsets for item in self.calls),
            operators=dict(sorted(Counter(most_per_call([item.operators for item in spans], calls)).most_common(_MOST_NAMES_KEPT))),
            other=max(item.other for item in self.calls),
            kernel_names=tuple(name for name, _ in names.most_common(_MOST_NAMES_KEPT)),
            choices=self.choices,
            unrecorded_collectives=self.unrecorded_collectives,
            complete=not self.faults,
        )

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return mechanisms([*self.calls, *self.blocks], self.loaded)


def profiler_works(session: Session) -> bool:
    """Tells whether a kernel of PyTorch's is seen in fresh ranks, in which no candidate ever was."""
    group = session.take_group()
    try:
        recordings = group.ask(Request(CandidateInterface.probe_profiler, secrets.token_hex(16)), "audit", session.deadlines.first_call)
    except GroupFailure:
        return False
    finally:
        group.kill()
    seen = [activity(recording.host, recording.device) for recording in recordings]
    return all(_shows_work(item, session.place) for item in seen)


def _shows_work(item: Activity, place: Place) -> bool:
    """True if something ran; where there are GPUs, on the device."""
    return bool(item.device_events) if place.has_gpus else not item.empty


def _by_kind(kernels: Counter[str], triton: Sequence[str] | set[str]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name, count in kernels.items():
        kinds[kernel_kind(name, triton)] += count
    return kinds
