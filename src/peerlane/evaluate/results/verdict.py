"""What an evaluation says: a verdict with the fields its kind requires, and the evidence. An invalid record cannot be constructed.

Read :class:`Result` first. Runs only on the supervisor's side; rank workers never import pydantic.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from peerlane.evaluate.results.feedback import feedback
from peerlane.evaluate.results.messages import error_line, first_compiler_error
from peerlane.evaluate.results.record import Mode, Record
from peerlane.evaluate.results.rewards import RewardKind, reward
from peerlane.evaluate.results.sanitize import one_line
from peerlane.evaluate.results.speed_record import Estimate, ModeSpeed, Speed

Phase = Literal["spawn", "build", "import", "first_call", "correctness", "stress", "timing", "audit", "exit"]
Track = Literal["open", "custom"]
MechanismName = Literal["copy_engine", "sm_load_store", "tma", "nvls", "nccl", "gloo"]
Confidence = Literal["seen", "possible", "loaded"]

# What a wrong result is called whose output is an argument, and why it is wrong where the call must leave it alone.
ARGUMENT = "argument "
CHANGED = "changed, which the problem does not allow"


# --- verdicts ---------------------------------------------------------------------------------------------------------------


class Correct(Record):
    """Right on every rank, in every slot that was compared."""

    kind: Literal["correct"] = "correct"

    @property
    def reason(self) -> str:
        return "right on every rank in every compared slot"


class WrongResult(Record):
    """Right shape and dtype, wrong contents."""

    kind: Literal["wrong_result"] = "wrong_result"
    case: str = Field(description="key of the case, such as 13/small/ragged/w2")
    phase: Phase
    rank: int = Field(ge=0)
    slot: int = Field(ge=0)
    output: str
    error_ratio: float = Field(gt=1.0, description="error divided by what is allowed; infinite where an exact output differs")
    detail: str
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    wrong_ranks: tuple[int, ...] = Field(min_length=1)

    @property
    def reason(self) -> str:
        if self.output.startswith(ARGUMENT) and self.detail == CHANGED:
            return f"{self.output} was {CHANGED} (rank {self.rank}, case {self.case}, slot {self.slot})"
        found = (("got", self.got), ("expected", self.expected))  # either may be missing: an answer too many, or one that is not there
        values = ", ".join(f"{name} {value:.6g}" for name, value in found if value is not None)
        place = f" at {list(self.index)}: {values}" if self.index and values else ""
        return f"{self.output} is wrong on rank {self.rank} (case {self.case}, slot {self.slot}); {self.detail}{place}"


class WrongType(Record):
    """Wrong structure, shape or dtype."""

    kind: Literal["wrong_type"] = "wrong_type"
    case: str
    rank: int = Field(ge=0)
    detail: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        return f"rank {self.rank}, case {self.case}: {self.detail}"


class _InCase(Record):
    """What may have happened in a case."""

    case: str | None = Field(default=None, description="key of the case that ran; None if none did, and in older records")
    dtype: str | None = Field(default=None, description="the case's dtype")

    @property
    def _case(self) -> str:
        """To be read behind the phase. Cases of ``small`` run with every preset, in other dtypes."""
        return f", case {self.case} ({self.dtype})" if self.case is not None else ""


class _Failure(_InCase):
    phase: Phase
    rank: int | None = Field(default=None, ge=0, description="the first rank that failed; None in a phase without ranks")
    message: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        where, line = f"rank {self.rank}, " if self.rank is not None else "", self._telling_line
        limit = " (a limit of gloo on CPU ranks; NCCL may accept it)" if "ProcessGroupGloo" in line else ""
        return f"{where}{self.phase}{self._case}: {line}{limit}"

    @property
    def _telling_line(self) -> str:
        return error_line(self.message)


class BuildError(_Failure):
    """The candidate's device code did not compile; the message ends with the compiler's log, whose first error is the reason."""

    kind: Literal["build_error"] = "build_error"

    @property
    def _telling_line(self) -> str:
        return first_compiler_error(self.message) or super()._telling_line


class ImportFailure(_Failure):
    """The candidate could not be imported, or has no ``solution``."""

    kind: Literal["import_error"] = "import_error"


class RuntimeFailure(_Failure):
    """``solution`` raised, or a rank's process ended."""

    kind: Literal["runtime_error"] = "runtime_error"


class CudaError(_Failure):
    """CUDA reported an error: illegal address, failed launch, device-side assertion."""

    kind: Literal["cuda_error"] = "cuda_error"


class OutOfMemory(_Failure):
    """Device or host memory ran out."""

    kind: Literal["out_of_memory"] = "out_of_memory"


class Hang(_InCase):
    """A phase did not end within its deadline; the whole group was killed."""

    kind: Literal["hang"] = "hang"
    phase: Phase
    ranks: tuple[int, ...] = Field(min_length=1, description="the ranks that had not finished")
    deadline_s: float = Field(gt=0)

    @property
    def reason(self) -> str:
        return f"{self.phase}{self._case}: rank(s) {', '.join(map(str, self.ranks))} not done after {self.deadline_s:g} s"


class Unstable(Record):
    """Right at rest, wrong under jitter: a race."""

    kind: Literal["unstable"] = "unstable"
    case: str
    rank: int = Field(ge=0)
    output: str
    detail: str
    wrong_slots: int = Field(ge=1)
    compared_slots: int = Field(ge=1)

    @property
    def reason(self) -> str:
        return f"{self.output} wrong in {self.wrong_slots} of {self.compared_slots} slots (rank {self.rank}): {self.detail}"


class IntegrityFailure(Record):
    """The clock, the processes or the harness's state were interfered with."""

    kind: Literal["integrity_failure"] = "integrity_failure"
    phase: Phase
    what: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        return f"{self.phase}: {self.what}"


class TrackViolation(Record):
    """Uses what the track forbids."""

    kind: Literal["track_violation"] = "track_violation"
    what: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        return self.what


class HarnessFailure(Record):
    """peerlane failed; says nothing about the candidate."""

    kind: Literal["harness_error"] = "harness_error"
    phase: Phase
    message: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        return f"{self.phase}: {one_line(self.message.strip().splitlines()[-1])}"


class NotRun(Record):
    """This machine lacks what the candidate needs."""

    kind: Literal["not_run"] = "not_run"
    missing: str = Field(min_length=1, description="what is lacking, and what to do about it")

    @property
    def reason(self) -> str:
        return self.missing


Verdict = Annotated[
    Correct
    | WrongResult
    | WrongType
    | BuildError
    | ImportFailure
    | RuntimeFailure
    | CudaError
    | OutOfMemory
    | Hang
    | Unstable
    | IntegrityFailure
    | TrackViolation
    | HarnessFailure
    | NotRun,
    Field(discriminator="kind"),
]


# --- evidence ---------------------------------------------------------------------------------------------------------------


class CandidateInfo(Record):
    """Which code was judged."""

    name: str
    path: str | None = Field(default=None, description="None for the built-in reference")
    sha256: str = Field(min_length=16, description="of the file's bytes; of the word 'reference' and the version for the reference")
    backend: Literal["pytorch", "cuda", "triton", "reference"]


class ProblemInfo(Record):
    """Which problem, in which variant."""

    id: int = Field(ge=1)
    slug: str
    variant: str


class CaseEvidence(Record):
    """What was compared in one case."""

    case: str
    slots: int = Field(ge=0, description="slots compared, on every rank")
    integer_slots: int = Field(ge=0, description="of those, drawn so that the answer is exact")
    timed_slots: int = Field(ge=0, description="of those, outputs of timed calls")
    stressed_slots: int = Field(default=0, ge=0, description="of those, outputs of calls under stress")
    stressed_calls: int = Field(default=0, ge=0, description="calls under stress, compared or not")
    max_error_over_tolerance: float = Field(ge=0)

    def joined(self, other: CaseEvidence) -> CaseEvidence:
        """The evidence of two trials of one case together."""
        counts = ("slots", "integer_slots", "timed_slots", "stressed_slots", "stressed_calls")
        added = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return CaseEvidence(
            case=self.case, **added, max_error_over_tolerance=max(self.max_error_over_tolerance, other.max_error_over_tolerance)
        )


class EvaluationKey(NamedTuple):
    """The identity of an evaluation; see :attr:`Result.key`."""

    evaluator_version: str
    sha256: str
    problem: int
    variant: str
    preset: str
    world_size: int
    device: str
    modes: tuple[Mode, ...]
    track: Track
    isolation: str
    cases: str = "all"


class Audit(Record):
    """What ran in audited calls. Counts are per call: the largest of any rank and call."""

    calls: int = Field(ge=1, description="audited calls, on every rank")
    block_modes: tuple[Mode, ...] = Field(description="launch modes in which a whole block was recorded too")
    kernels: dict[str, int] = Field(description="by whose they are: own, triton, library, aten, nccl")
    copies: dict[str, int] = Field(description="by the memory at their ends: peer, same_gpu, host")
    memsets: int = Field(ge=0)
    operators: dict[str, int] = Field(description="PyTorch's operators of communication, by name")
    other: int = Field(ge=0, description="all else that was recorded: other operators, calls of the CUDA runtime")
    kernel_names: tuple[str, ...] = Field(description="of the kernels that ran, the most frequent first, 32 at most")
    unrecorded_collectives: int = Field(ge=0, description="that process groups counted in calls which were not recorded")
    complete: bool = Field(description="every record has both marks that were set at its ends, and the profiler was left alone")

    @property
    def own_communication(self) -> bool:
        """True if the record is complete and holds no communication but the candidate's own."""
        return self.complete and not (self.operators or self.unrecorded_collectives or self.kernels.get("nccl", 0))


class Mechanism(Record):
    """A way to move data between ranks, and what speaks for its use.

    ``seen``: in an audited call, or instructions for it in a kernel that ran there. ``possible``: what ran there may have served it or
    something else. ``loaded``: instructions in code that was loaded and did not run there.
    """

    name: MechanismName
    confidence: Confidence
    evidence: str = Field(min_length=1)


class Result(Record):
    """One candidate, one problem, one preset, one world size. The unit of ``results.jsonl``."""

    schema_version: Literal[1] = 1
    evaluator_version: str
    run_id: str
    finished_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    candidate: CandidateInfo
    problem: ProblemInfo
    preset: str
    world_size: int = Field(ge=1)
    device: Literal["cuda", "cpu"]
    modes: tuple[Mode, ...] = Field(description="launch modes asked for; none: correctness alone")
    cases: Literal["all", "timed"] = Field(default="all", description="timed: the preset's first case alone was judged")
    isolation: Literal["L0", "L1", "L2"] = Field(description="L0: unverified, the candidate was not confined")
    isolation_measures: tuple[str, ...] = Field(default=(), description="what kept the candidate from evaluator and machine")
    track: Track
    verdict: Verdict
    correctness: tuple[CaseEvidence, ...] = ()
    speed: tuple[Speed, ...] = ()
    audit: Audit | None = Field(default=None, description="None where no call was audited: the reference, failures before, older records")
    mechanisms: tuple[Mechanism, ...] = Field(default=(), description="how it moves data, by evidence; says nothing without an audit")
    flags: tuple[str, ...] = Field(default=(), description="remarkable but legitimate, such as aliased_output")
    stage_seconds: dict[str, float] = Field(default_factory=dict, description="wall time by phase, seconds")
    log_tail: str = Field(default="", description="the end of what the candidate's ranks printed, after a failure")
    environment: dict[str, Any]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.verdict, Correct):
            if not self.correctness or any(item.slots == 0 for item in self.correctness):
                raise ValueError("a correct verdict needs compared slots in every case")
            if any(item.max_error_over_tolerance > 1.0 for item in self.correctness):
                raise ValueError("a correct verdict cannot have an error ratio above 1")
            if tuple(item.mode for item in self.speed) != self.modes:
                raise ValueError("a correct verdict states the speed, or why it was not measured, for every mode asked for")
            if self.track == "custom" and (self.audit is None or not self.audit.own_communication):
                raise ValueError("a correct verdict in the custom track needs an audit that shows no communication but the candidate's own")
        elif self.speed:
            raise ValueError(f"a {self.verdict.kind} verdict cannot carry a speed")
        return self

    @property
    def correct(self) -> bool:
        """True for a correct verdict and nothing else."""
        return isinstance(self.verdict, Correct)

    @property
    def key(self) -> EvaluationKey:
        """Identifies the evaluation: a second run with the same key has nothing to add."""
        return EvaluationKey(
            evaluator_version=self.evaluator_version,
            sha256=self.candidate.sha256,
            problem=self.problem.id,
            variant=self.problem.variant,
            preset=self.preset,
            world_size=self.world_size,
            device=self.device,
            modes=self.modes,
            track=self.track,
            isolation=self.isolation,
            cases=self.cases,
        )

    def speed_in(self, mode: str) -> ModeSpeed | None:
        """The measured speed in a mode, or None."""
        for item in self.speed:
            if isinstance(item, ModeSpeed) and item.mode == mode:
                return item
        return None

    def speedup(self, mode: str) -> Estimate | None:
        """The speedup over the reference in a launch mode, with its 95 % interval; None where it was not measured."""
        measured = self.speed_in(mode)
        return None if measured is None else measured.speedup

    def reward(self, kind: RewardKind, *, p: float = 1.0, mode: Mode | None = None) -> float | None:
        """A number to train on. 0.0 for a candidate that is not correct.

        Args:
            kind: ``correct``: 1.0. ``log_speedup``: log2(1 + speedup), so that a correct candidate as fast as the reference gets 1.0.
                ``fast_p``: 1.0 if the speedup is above ``p``, else 0.0. A speedup is the low end of its interval.
            mode: the launch mode that counts; None: the one with the largest speedup.

        Returns:
            None where the result says nothing: ``harness_error``, ``not_run``, or a speedup that was not measured.
        """
        return reward(self, kind, p, mode)

    def feedback(self) -> str:
        """What the candidate's author needs, in 60 lines at most: verdict, where, how far, first error, what to try; no expected value."""
        return feedback(self)
