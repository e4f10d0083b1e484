"""The kinds of verdict, each with the fields it requires. Runs only on the supervisor's side; rank workers never import pydantic."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from peerlane.results.diagnostics import error_line, first_compiler_error, last_line
from peerlane.results.record import Ratio, Record, Value
from peerlane.results.sanitize import one_line

SAYS_NOTHING = ("harness_error", "not_run")
"""The kinds that say nothing about the candidate."""
Phase = Literal["spawn", "build", "import", "first_call", "correctness", "stress", "timing", "audit", "exit"]

# What a wrong result is called whose output is an argument, and why it is wrong where the call must leave it alone.
ARGUMENT = "argument "
CHANGED = "changed, which the problem does not allow"

_OWN_FOLDERS = " (a confined candidate may write below its working directory and tempfile.gettempdir() alone)"
_HINTS = {
    "ProcessGroupGloo": " (a limit of gloo on CPU ranks; NCCL may accept it)",
    "PermissionError: [Errno 13]": _OWN_FOLDERS,
    "Read-only file system": _OWN_FOLDERS,
}
"""What to add to a failure whose line has these words."""


class _Verdict(Record):
    """A verdict whose reason is its ``said``, with its fields in their places."""

    said: ClassVar[str]

    @property
    def reason(self) -> str:
        return self.said.format_map(vars(self))


class Correct(_Verdict):
    """Right on every rank, in every slot that was compared."""

    kind: Literal["correct"] = "correct"
    said: ClassVar[str] = "right on every rank in every compared slot"


class WrongResult(Record):
    """Right shape and dtype, wrong contents."""

    kind: Literal["wrong_result"] = "wrong_result"
    case: str = Field(description="key of the case, such as 13/small/ragged/w2")
    phase: Phase
    rank: int = Field(ge=0)
    slot: int = Field(ge=0)
    output: str
    error_over_tolerance: Ratio = Field(gt=1.0, description="None in JSON where an exact output differs, or a value is not finite")
    detail: str
    index: tuple[int, ...] | None = None
    got: Value | None = None
    expected: Value | None = None
    wrong_ranks: tuple[int, ...] = Field(min_length=1)

    @property
    def reason(self) -> str:
        if self.output.startswith(ARGUMENT) and self.detail == CHANGED:
            place = f"(rank {self.rank}, case {self.case}, slot {self.slot})"
            return f"{self.output} was {CHANGED} {place}; clone it first: .float(), .to() and .contiguous() may return the argument itself"
        found = (("got", self.got), ("expected", self.expected))  # either may be missing: an answer too many, or one that is not there
        values = ", ".join(f"{name} {value:.6g}" for name, value in found if value is not None)
        place = f" at {list(self.index)}: {values}" if self.index and values else ""
        return f"{self.output} is wrong on rank {self.rank} (case {self.case}, slot {self.slot}); {self.detail}{place}"


class WrongType(_Verdict):
    """Wrong structure, shape or dtype."""

    kind: Literal["wrong_type"] = "wrong_type"
    case: str
    rank: int = Field(ge=0)
    detail: str = Field(min_length=1)
    said: ClassVar[str] = "rank {rank}, case {case}: {detail}"


class _InCase(Record):
    """An event that may have happened in a case."""

    case: str | None = Field(default=None, description="key of the case that ran; None if none did, and in older records")
    dtype: str | None = Field(default=None, description="the case's dtype")

    @property
    def _case(self) -> str:
        """Returns the words about the case that follow the phase. Cases of ``small`` run with every preset, in other dtypes."""
        return f", case {self.case} ({self.dtype})" if self.case is not None else ""


class _Failure(_InCase):
    phase: Phase
    rank: int | None = Field(default=None, ge=0, description="the first rank that failed; None in a phase without ranks")
    message: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        where, line = f"rank {self.rank}, " if self.rank is not None else "", self._telling_line
        hint = next((hint for mark, hint in _HINTS.items() if mark in line), "")
        return f"{where}{self.phase}{self._case}: {line}{hint}"

    @property
    def _telling_line(self) -> str:
        return error_line(self.message)


class BuildError(_Failure):
    """The candidate's device code did not compile; the message ends with the compiler's log, whose first error is the reason."""

    kind: Literal["build_error"] = "build_error"

    @property
    def _telling_line(self) -> str:
        return first_compiler_error(self.message) or last_line(self.message)


class ImportFailure(_Failure):
    """The candidate could not be imported, or has no ``solution``."""

    kind: Literal["import_error"] = "import_error"


class RuntimeFailure(_Failure):
    """``solution`` raised, or a rank's process ended."""

    kind: Literal["runtime_error"] = "runtime_error"


class CudaError(_Failure):
    """CUDA reported an error: illegal address, failed launch, device-side assertion."""

    kind: Literal["cuda_error"] = "cuda_error"

    @property
    def _telling_line(self) -> str:
        error, last = error_line(self.message), last_line(self.message)
        # Reports of the emulator, and of waits that ran out of time, come last; so does torch's advice after an error of CUDA.
        return error if "CUDA error" in error and "waited for rank" not in last else last


class OutOfMemory(_Failure):
    """Device or host memory ran out."""

    kind: Literal["out_of_memory"] = "out_of_memory"


class Hang(_InCase):
    """Code of the candidate did not return in time: its import, a call, or what it left for the exit. The whole group was killed."""

    kind: Literal["hang"] = "hang"
    phase: Phase
    ranks: tuple[int, ...] = Field(min_length=1, description="the ranks that had not finished")
    deadline_s: float = Field(gt=0)

    @property
    def reason(self) -> str:
        return f"{self.phase}{self._case}: rank(s) {', '.join(map(str, self.ranks))} not done after {self.deadline_s:g} s"


class TooSlow(_InCase):
    """Calls of the candidate returned, and the time limit of the evaluation passed before a verdict."""

    kind: Literal["too_slow"] = "too_slow"
    phase: Phase
    limit_s: float = Field(gt=0, description="the evaluation's time limit")
    calls_s: float = Field(ge=0, description="of it, the time in which ranks ran the candidate's code")

    @property
    def reason(self) -> str:
        return f"{self.phase}{self._case}: not done within {self.limit_s:g} s, of which the candidate's code took {self.calls_s:.3g} s"


class Unstable(_Verdict):
    """Right at rest, wrong under jitter: a race."""

    kind: Literal["unstable"] = "unstable"
    case: str
    rank: int = Field(ge=0)
    output: str
    detail: str
    wrong_slots: int = Field(ge=1)
    compared_slots: int = Field(ge=1, description="slots; of emulated ranks, schedules")
    findings: tuple[str, ...] = Field(default=(), description="what the emulator found: both sides of each race, with their source lines")
    said: ClassVar[str] = "{output} wrong in {wrong_slots} of {compared_slots} slots (rank {rank}): {detail}"

    @property
    def reason(self) -> str:
        if not self.findings:
            return super().reason
        return f"{self.output} (case {self.case}, in {self.wrong_slots} of {self.compared_slots} schedules): {self.detail}"


class IntegrityFailure(_Verdict):
    """The clock, the processes or the harness's state were interfered with."""

    kind: Literal["integrity_failure"] = "integrity_failure"
    phase: Phase
    what: str = Field(min_length=1)
    said: ClassVar[str] = "{phase}: {what}"


class TrackViolation(_Verdict):
    """Uses what the track forbids."""

    kind: Literal["track_violation"] = "track_violation"
    what: str = Field(min_length=1)
    said: ClassVar[str] = "{what}"


class HarnessFailure(Record):
    """peerlane failed; says nothing about the candidate."""

    kind: Literal["harness_error"] = "harness_error"
    phase: Phase
    message: str = Field(min_length=1)

    @property
    def reason(self) -> str:
        return f"{self.phase}: {one_line(self.message.strip().splitlines()[-1])}"


class NotRun(_Verdict):
    """This machine lacks what the candidate needs."""

    kind: Literal["not_run"] = "not_run"
    missing: str = Field(min_length=1, description="what is lacking, and what to do about it")
    said: ClassVar[str] = "{missing}"


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
    | TooSlow
    | Unstable
    | IntegrityFailure
    | TrackViolation
    | HarnessFailure
    | NotRun,
    Field(discriminator="kind"),
]
