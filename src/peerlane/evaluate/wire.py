"""The wire between the supervisor and its rank processes: a class for every request and every answer.

A request class names its answer: ``class Call(Request[Called])``. Its operation on the wire is its name in snake case, ``call``. Stubs in
``correctness/ranks.py`` send requests; rank classes in ``ranks/`` list a handler for each request that they serve.
:mod:`peerlane.evaluate.messages` checks and converts them. Standard library only: rank processes import this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

from peerlane.errors import ProtocolError
from peerlane.evaluate.wire_records import MOST_FINDINGS, MOST_NAMES, at_most
from peerlane.evaluate.wire_records import BlockPlan as BlockPlan
from peerlane.evaluate.wire_records import CaseId as CaseId
from peerlane.evaluate.wire_records import CaseLayout as CaseLayout
from peerlane.evaluate.wire_records import Connection as Connection
from peerlane.evaluate.wire_records import Count as Count
from peerlane.evaluate.wire_records import LaunchMode as LaunchMode
from peerlane.evaluate.wire_records import LoadedKernel as LoadedKernel
from peerlane.evaluate.wire_records import Microseconds as Microseconds
from peerlane.evaluate.wire_records import Name as Name
from peerlane.evaluate.wire_records import OutOfBounds as OutOfBounds
from peerlane.evaluate.wire_records import Outputs as Outputs
from peerlane.evaluate.wire_records import RaceFinding as RaceFinding
from peerlane.evaluate.wire_records import Recording as Recording
from peerlane.evaluate.wire_records import Side as Side
from peerlane.evaluate.wire_records import SlotScore as SlotScore

A = TypeVar("A", bound="Answer", covariant=True)
ErrorKind = Literal["runtime_error", "import_error", "cuda_error", "out_of_memory", "build_error", "not_run"]

# --- answers ---


class Answer:
    """An answer of a rank to a request that it has carried out."""


@dataclass(frozen=True)
class Done(Answer):
    """The request has been carried out; there is nothing else to say."""


@dataclass(frozen=True)
class Built(Answer):
    """``raised``: what the import raised that a GPU may mend, in a line; ``by_nvcc``: device code of extensions was compiled for a GPU."""

    raised: Name | None
    by_nvcc: bool


@dataclass(frozen=True)
class Initialized(Answer):
    """``pid``: the number of the rank's process."""

    pid: Count


@dataclass(frozen=True)
class ExportedArena(Answer):
    """The handle of an arena, and the byte that was written into it."""

    arena: dict[str, Any]
    byte: int


@dataclass(frozen=True)
class ImportedArena(Answer):
    """The first byte of the arena that was mapped."""

    byte: Count


@dataclass(frozen=True)
class PreparedBlock(Answer):
    """``failure``: why the calls could not be captured into a graph; None if the block is ready."""

    failure: str | None


@dataclass(frozen=True)
class BlockRun(Answer):
    """The time between the events around a block's calls, the host's time to launch them, and the collectives that were counted."""

    events_us: Microseconds
    launch_us: Microseconds
    collectives: Count


@dataclass(frozen=True)
class SecretTaken(Answer):
    """``sm_holder``: the kernel that candidates' ranks hold SMs with, in base 64; empty on CPUs."""

    sm_holder: str


@dataclass(frozen=True)
class OpenedCase(Answer):
    """The layout of a case. ``reference_s``, ``quickest_s``: the longest and the shortest that one call of the reference took."""

    layout: CaseLayout
    reference_s: float
    quickest_s: float


@dataclass(frozen=True)
class CopiesTime(Answer):
    """The time of a block's swaps and output copies alone: the device's, and the host's to launch the copies."""

    copies_us: Microseconds
    launch_us: Microseconds


@dataclass(frozen=True)
class CollectedBytes(Answer):
    """The number of bytes that wait to be judged."""

    bytes: int


@dataclass(frozen=True)
class OutputComparison(Answer):
    """``changed``: the number of the first tensor that is not what it was when it was saved."""

    changed: int | None
    out_of_bounds: OutOfBounds | None


@dataclass(frozen=True)
class Judgement(Answer):
    """The oracle's scores of all collected outputs of a rank, and the arguments that were changed and may not be."""

    slots: list[SlotScore]
    changed_arguments: list[str]
    out_of_bounds: OutOfBounds | None


@dataclass(frozen=True)
class MeasuredMargins(Answer):
    """The fields of :class:`peerlane.problems.contract.calibration.Margins`."""

    margins: dict[str, Any]


@dataclass(frozen=True)
class Called(Answer):
    """The outputs of calls. ``aliased``: one returned the same storage as the call before it. ``collectives``: counted in the calls."""

    outputs: Outputs
    aliased: bool
    recordings: list[Recording]
    collectives: Count


@dataclass(frozen=True)
class DescribedOutputs(Answer):
    """The outputs of calls, slot by slot."""

    outputs: Outputs


@dataclass(frozen=True)
class ProfiledBlock(Answer):
    """The recording of a block, and the outputs of its calls."""

    recording: Recording
    outputs: Outputs


@dataclass(frozen=True)
class ProbedProfiler(Answer):
    """The recording of one kernel by the profiler."""

    recording: Recording


@dataclass(frozen=True)
class Connections(Answer):
    """The TCP connections of the rank's process."""

    connections: Annotated[list[Connection], at_most(MOST_NAMES)]


@dataclass(frozen=True)
class LoadedCode(Answer):
    """``unknown``: what could not be read, and why; ``choices``: what the kit's tuner has chosen; ``sources``: hashes of the tokens of the
    kit kernels' sources."""

    kernels: Annotated[list[LoadedKernel], at_most(MOST_NAMES)]
    unknown: list[str]
    choices: list[str]
    sources: Annotated[list[str], at_most(MOST_NAMES)]


@dataclass(frozen=True)
class RaceReport(Answer):
    """The emulator's findings in all launches so far, how often each kernel was launched, and the hashes of their sources' tokens."""

    findings: Annotated[list[RaceFinding], at_most(MOST_FINDINGS)]
    launches: dict[str, Count]
    sources: Annotated[list[str], at_most(MOST_NAMES)]
    kernels: Annotated[list[Name], at_most(MOST_NAMES)] | None
    """what each needs of a GPU, in words; None: there is no compiler for GPUs here"""
    collectives: dict[str, Count]
    """calls of torch.distributed's collectives, of all ranks together"""


# --- requests ---


class Request(Generic[A]):
    """A request of the supervisor to a rank.

    Attributes:
        op: the operation's name on the wire.
        answer: the class of its answer.
        failure_kind: the kind of an exception that nothing more is known of.
    """

    op: ClassVar[str]
    answer: ClassVar[type[Answer]]
    failure_kind: ClassVar[ErrorKind] = "runtime_error"

    def __init_subclass__(cls) -> None:
        cls.op = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        (cls.answer,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        REQUESTS[cls.op] = cls

    def check(self, answer: Any) -> None:
        """Raises ProtocolError if an answer does not fit this request."""


REQUESTS: dict[str, type[Request[Answer]]] = {}
"""every request by its operation"""

# of every rank


@dataclass(frozen=True)
class Initialize(Request[Initialized]):
    """Joins the process group, where there is one, and runs one collective, so that connections exist."""


@dataclass(frozen=True)
class ExportArena(Request[ExportedArena]):
    """Creates a small arena with a random byte in it, for another process to map."""


@dataclass(frozen=True)
class ImportArena(Request[ImportedArena]):
    """Maps an arena that another rank exported and reads its first byte."""

    arena: dict[str, Any]


@dataclass(frozen=True)
class UseDevice(Request[Done]):
    """Runs a small kernel, to see whether the device works."""


@dataclass(frozen=True)
class Exit(Request[Done]):
    """Ends the process after its answer."""


# of ranks that time blocks


@dataclass(frozen=True)
class PrepareBlock(Request[PreparedBlock]):
    """Builds a timed block; for graphs this captures its calls. Trusted ranks have the reference alone."""

    space: str
    mode: LaunchMode
    side: Side
    plan: BlockPlan


@dataclass(frozen=True)
class WarmUpBlock(Request[Done]):
    """Runs the prepared block once, without clocks."""


@dataclass(frozen=True)
class ReadyBlock(Request[Done]):
    """Makes the rank ready to run the prepared block: on this core, with no garbage, idle devices and a cold cache."""

    core: int


@dataclass(frozen=True)
class RunBlock(Request[BlockRun]):
    """Runs the prepared block between two events."""


# of trusted ranks


@dataclass(frozen=True)
class TakeSecret(Request[SecretTaken]):
    """Hands over the run's secret, which seeds all inputs."""

    secret: str


@dataclass(frozen=True)
class OpenCase(Request[OpenedCase]):
    """Lays out up to ``slots`` calls of a case, as many as fit into ``most_bytes``. ``alone``: whatever else is open is closed before."""

    space: str
    case: CaseId
    slots: int
    most_bytes: float
    alone: bool


@dataclass(frozen=True)
class CloseCase(Request[Done]):
    """Frees a case's memory."""

    space: str


@dataclass(frozen=True)
class GenerateInputs(Request[Done]):
    """Draws new contents for the first ``len(kinds)`` slots, in private memory; ``kinds`` says which of them are integer draws."""

    space: str
    block: int
    kinds: list[str]


@dataclass(frozen=True)
class PublishInputs(Request[Done]):
    """Makes the contents of the first ``slots`` slots visible to the candidate."""

    space: str
    slots: int


@dataclass(frozen=True)
class UndoSwaps(Request[Done]):
    """Undoes the swaps of the prepared block, behind a run of it."""

    space: str


@dataclass(frozen=True)
class TimeCopies(Request[CopiesTime]):
    """Times the swaps and output copies of the prepared block without its calls."""

    space: str


@dataclass(frozen=True)
class KeepDeviceBusy(Request[Done]):
    """Keeps the rank's GPU busy for ``seconds``, beside whoever else uses it."""

    seconds: float


@dataclass(frozen=True)
class CollectOutputs(Request[CollectedBytes]):
    """Copies the candidate's snapshots of ``slots`` out of the arena. Their calls got what was generated for the slots ``contents``.

    ``outputs`` describes what the calls returned. The inputs of the slots ``intact`` may not have changed.
    """

    space: str
    slots: list[int]
    contents: list[int]
    outputs: Outputs
    intact: list[int]


@dataclass(frozen=True)
class DiscardOutputs(Request[Done]):
    """Forgets the outputs that were collected."""

    space: str


@dataclass(frozen=True)
class JudgeOutputs(Request[Judgement]):
    """Compares all collected outputs with the oracle. ``at_rest``: the candidate alone has touched the inputs since they were published.
    ``judges``: for each of them the one rank whose output is compared; empty: those of all ranks are."""

    space: str
    at_rest: bool
    judges: list[int]


@dataclass(frozen=True)
class SaveOutput(Request[Done]):
    """Keeps a copy of one slot's outputs, which the candidate's ranks are about to copy once more."""

    space: str
    slot: int


@dataclass(frozen=True)
class CompareOutput(Request[OutputComparison]):
    """Compares the saved outputs with what lies in their slot now."""

    space: str


@dataclass(frozen=True)
class MeasureMargins(Request[MeasuredMargins]):
    """Measures how far reference, alternative solutions and known wrong answers are from the tolerance."""

    case: CaseId


# of a candidate's ranks


@dataclass(frozen=True)
class LoadSmHolder(Request[Done]):
    """Loads the kernel that holds SMs under stress, before candidate code is there."""

    code: str


@dataclass(frozen=True)
class AttachCase(Request[Done]):
    """Maps a case that the trusted ranks have laid out."""

    space: str
    problem: int
    variant: str
    layout: CaseLayout


@dataclass(frozen=True)
class DetachCase(Request[Done]):
    """Lets go of a case's memory."""

    space: str


@dataclass(frozen=True)
class LoadReference(Request[Done]):
    """Takes the reference for the candidate."""

    problem: int
    variant: str


@dataclass(frozen=True)
class LoadCandidate(Request[Done]):
    """Imports the candidate's ``source``, which was at ``path``. ``cache``: the folder of its own builds. ``granted``: sources of the
    solutions that it may import, by module."""

    failure_kind = "import_error"

    path: str
    source: str
    cache: str | None
    problem: int
    variant: str
    granted: dict[str, str]


@dataclass(frozen=True)
class Call(Request[Called]):
    """Calls a side on ``slots``, one after the other, at rest. With a ``marker`` calls are recorded, with ``timeline`` event by event."""

    space: str
    side: Side
    slots: list[int]
    marker: str | None = None
    timeline: bool = False

    def check(self, answer: Called) -> None:
        _must_be(len(self.slots), answer.outputs, "descriptions of outputs")
        _must_be(0 if self.marker is None else len(self.slots), answer.recordings, "recordings")
        _must_have_events(self.timeline, answer.recordings)


@dataclass(frozen=True)
class CallUnderStress(Request[DescribedOutputs]):
    """Calls the candidate on the slots in ``order``, which are the first ``len(order)``, with no wait between the calls.

    ``jitter`` lists (position, way, us): what happens before which call. ``poisoned``: the positions before which freed memory is filled
    with NaN; ``kept``: those whose inputs are left as they are behind the call. ``swaps``: steps of :class:`SlotSwaps`.
    """

    space: str
    order: list[int]
    jitter: list[tuple[int, str, float]]
    poisoned: list[int]
    kept: list[int]
    swaps: tuple[tuple[int, int, int], ...]

    def check(self, answer: DescribedOutputs) -> None:
        _must_be(len(self.order), answer.outputs, "descriptions of outputs")


@dataclass(frozen=True)
class DescribeOutputs(Request[DescribedOutputs]):
    """Describes what the calls of the latest block returned for the first ``slots`` slots, slot by slot."""

    space: str
    slots: int

    def check(self, answer: DescribedOutputs) -> None:
        _must_be(self.slots, answer.outputs, "descriptions of outputs")


@dataclass(frozen=True)
class RecopyOutput(Request[Done]):
    """Copies what the latest call returned into its region once more."""

    space: str
    slot: int


@dataclass(frozen=True)
class ProfileBlock(Request[ProfiledBlock]):
    """Runs the prepared block under the profiler, and describes the outputs of its ``slots`` slots. Ranks begin a ``timeline`` together."""

    space: str
    slots: int
    marker: str
    timeline: bool

    def check(self, answer: ProfiledBlock) -> None:
        _must_be(self.slots, answer.outputs, "descriptions of outputs")
        _must_have_events(self.timeline, [answer.recording])


@dataclass(frozen=True)
class ListLoadedCode(Request[LoadedCode]):
    """Lists the device code that was loaded since the candidate's import. ``libraries``: those it added are disassembled, which is slow."""

    libraries: bool


@dataclass(frozen=True)
class ProbeProfiler(Request[ProbedProfiler]):
    """Records a kernel of PyTorch's, to see whether the profiler works here."""

    marker: str


@dataclass(frozen=True)
class ListConnections(Request[Connections]):
    """Lists the process's TCP connections, with the bytes that they have received."""


@dataclass(frozen=True)
class ReportRaces(Request[RaceReport]):
    """Reports what the emulator has found so far. For emulated ranks."""


# of builders


@dataclass(frozen=True)
class BuildCandidate(Request[Built]):
    """Imports the candidate, so that what it compiles is in its cache. ``gpu_only``: no rank of this run will import it.
    ``emulated``: its ranks are emulated."""

    failure_kind = "import_error"

    path: str
    source: str
    cache: str | None
    granted: dict[str, str]
    on_cpu: bool
    gpu_only: bool
    emulated: bool = False


# --- checks of an answer against its request ---


def _must_be(number: int, items: Sequence[Any], what: str) -> None:
    if len(items) != number:
        raise ProtocolError(f"expected {number} {what}, got {len(items)}")


def _must_have_events(timeline: bool, recordings: Iterable[Recording]) -> None:
    if any((recording.events is not None) != timeline for recording in recordings):
        raise ProtocolError(f"expected recordings {'with' if timeline else 'without'} the events of a timeline")
