"""Parts of requests to ranks and of their answers: limits, checked types, and records. Standard library only.

:mod:`peerlane.evaluate.rank_interface` declares the requests. :mod:`peerlane.evaluate.messages` checks and converts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from peerlane.evaluate.wire_format import Must, is_count

MOST_NAMES, NAME_CHARACTERS = 4_000, 300
"""different names that one rank may report of one span, and what is kept of each"""
MOST_EVENTS = 20_000
MOST_MARKS = 4
"""that one rank may report of one recording"""
MOST_FINDINGS, FINDING_CHARACTERS = 8, 4_000
"""races that the emulator reports of one case, and what is kept of each"""
_ROLE_CHARACTERS = 40
_LONGEST_US = 1e12


def _is_name(value: str) -> bool:
    return len(value) <= NAME_CHARACTERS


def _are_name_counts(value: dict[str, int]) -> bool:
    return len(value) <= MOST_NAMES and all(map(_is_name, value))


def _is_event(event: tuple[str, int, int, int]) -> bool:
    name, lane, start, end = event
    return _is_name(name) and -1 <= lane < 1 << 63 and 0 <= start <= end < 1 << 63


def _is_stamp(stamp: tuple[str, str, int, int, int]) -> bool:
    name, role, block, start, end = stamp
    return max(len(name), len(role)) <= _ROLE_CHARACTERS and 0 <= block < 1 << 63 and 0 <= start <= end < 1 << 63


def at_most(number: int) -> Must:
    return Must(f"at most {number} items", lambda value: len(value) <= number)


Count = Annotated[int, Must("an integer from 0 to 2**53", is_count)]
Microseconds = Annotated[float, Must("a time that is a number of at least 0", lambda value: 0 <= value < _LONGEST_US)]
Name = Annotated[str, Must(f"a text of at most {NAME_CHARACTERS} characters", _is_name)]
NameCounts = Annotated[dict[str, Count], Must(f"counts of at most {MOST_NAMES} names", _are_name_counts)]
Event = Annotated[tuple[str, int, int, int], Must("name, lane, start and end of an event", _is_event)]
RoleStamp = Annotated[tuple[str, str, int, int, int], Must("name, role, block, start and end of a span", _is_stamp)]
Outputs = list[Any]
"""one description for every slot, see :mod:`peerlane.problems.contract.tree`; trusted ranks judge what they say"""
Side = Literal["reference", "candidate"]
LaunchMode = Literal["eager", "graph"]
KernelOrigin = Literal["peerlane.device", "triton", "library"]


@dataclass(frozen=True)
class CaseId:
    """A case by its names."""

    problem: int
    preset: str
    label: str
    world_size: int
    nodes: int


@dataclass(frozen=True)
class Connection:
    """A TCP connection of a rank: the addresses of both ends, and the bytes that this end has received."""

    local: Name
    peer: Name
    received: Count


@dataclass(frozen=True)
class CaseLayout:
    """A trusted rank's layout of a case: the handle of its arena, where arguments and outputs of all slots lie, and how many bytes
    each take. Outputs lie behind the inputs. ``groups``: the members of each process group that arguments name."""

    arena: dict[str, Any]
    arguments: list[Any]
    outputs: list[Any]
    input_bytes: int
    output_bytes: int
    groups: dict[str, list[list[int]]]


@dataclass(frozen=True)
class BlockPlan:
    """The calls of a block, and the steps of :class:`SlotSwaps` between them. The output of every call is copied.

    With ``warm_up`` calls before it a block uses all slots in turn, and nothing is between its calls.
    """

    calls: int
    swaps: tuple[tuple[int, int, int], ...]
    warm_up: int = 0


@dataclass(frozen=True)
class Recording:
    """A profiler's record of one span: how often each name ran on the host and on the device, and the names of marks in it.

    ``functions``: how many functions of the evaluator's the rank compared with what they were. ``replaced``: those of them, or of the
    profiler, that are something else now. ``events`` (name, lane, start, end) and ``roles`` (name, role, block, start, end) are those of a
    timeline, in nanoseconds; None without one.
    """

    host: NameCounts
    device: NameCounts
    marks: Annotated[list[Name], at_most(MOST_MARKS)]
    collectives: Count
    functions: Count
    replaced: list[str]
    events: Annotated[list[Event], at_most(MOST_EVENTS)] | None
    roles: Annotated[list[RoleStamp], at_most(MOST_EVENTS)] | None


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel whose code a rank found loaded, by its name, its origin and the mechanisms that it has instructions for."""

    name: Name
    origin: KernelOrigin
    mechanisms: list[str]


@dataclass(frozen=True)
class RaceFinding:
    """Something that the emulator found wrong, and in how many schedules."""

    kind: str
    memory: str
    rank: Count
    schedules: Count
    summary: str
    text: Annotated[str, Must("a text that is not blank", lambda text: bool(text.strip()))]


@dataclass(frozen=True)
class OutOfBounds:
    """The place of a write that belongs to no tensor: beside which tensor of which slot."""

    slot: int
    name: str
    place: str


@dataclass(frozen=True)
class SlotScore:
    """An output of a call compared with the oracle: its worst tensor.

    ``mismatch``: why its structure, shapes or dtypes are wrong; then nothing else is known. ``digests``: of the outputs that must have the
    same bits on all ranks.
    """

    slot: int
    mismatch: str | None = None
    ratio: float = 0.0
    output: str = ""
    detail: str = ""
    index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    digests: tuple[tuple[str, int], ...] = ()


# --- answers ---


@dataclass(frozen=True)
class Built:
    """``raised``: what the import raised that a GPU may mend, in a line; ``by_nvcc``: device code of extensions was compiled for a GPU."""

    raised: Name | None
    by_nvcc: bool


@dataclass(frozen=True)
class ExportedArena:
    """The handle of an arena, and the byte that was written into it."""

    arena: dict[str, Any]
    byte: int


@dataclass(frozen=True)
class BlockRun:
    """The time between the events around a block's calls, the host's time to launch them, and the collectives that were counted."""

    events_us: Microseconds
    launch_us: Microseconds
    collectives: Count


@dataclass(frozen=True)
class OpenedCase:
    """The layout of a case. ``reference_s``, ``quickest_s``: the longest and the shortest that one call of the reference took."""

    layout: CaseLayout
    reference_s: float
    quickest_s: float


@dataclass(frozen=True)
class CopiesTime:
    """The time of a block's swaps and output copies alone: the device's, and the host's to launch the copies."""

    copies_us: Microseconds
    launch_us: Microseconds


@dataclass(frozen=True)
class OutputComparison:
    """``changed``: the number of the first tensor that is not what it was when it was saved."""

    changed: int | None
    out_of_bounds: OutOfBounds | None


@dataclass(frozen=True)
class Judgement:
    """The oracle's scores of all collected outputs of a rank, and the arguments that were changed and may not be."""

    slots: list[SlotScore]
    changed_arguments: list[str]
    out_of_bounds: OutOfBounds | None


@dataclass(frozen=True)
class Called:
    """The outputs of calls. ``aliased``: one returned the same storage as the call before it. ``collectives``: counted in the calls."""

    outputs: Outputs
    aliased: bool
    recordings: list[Recording]
    collectives: Count


@dataclass(frozen=True)
class ProfiledBlock:
    """The recording of a block, and the outputs of its calls."""

    recording: Recording
    outputs: Outputs


@dataclass(frozen=True)
class LoadedCode:
    """``unknown``: what could not be read, and why; ``choices``: what the kit's tuner has chosen; ``sources``: hashes of the tokens of the
    kit kernels' sources."""

    kernels: Annotated[list[LoadedKernel], at_most(MOST_NAMES)]
    unknown: list[str]
    choices: list[str]
    sources: Annotated[list[str], at_most(MOST_NAMES)]


@dataclass(frozen=True)
class RaceReport:
    """The emulator's findings since the last report, how often each kernel was launched so far, and the hashes of their sources' tokens."""

    findings: Annotated[list[RaceFinding], at_most(MOST_FINDINGS)]
    launches: dict[str, Count]
    sources: Annotated[list[str], at_most(MOST_NAMES)]
    kernels: Annotated[list[Name], at_most(MOST_NAMES)] | None
    """what each needs of a GPU, in words; None: there is no compiler for GPUs here"""
    collectives: dict[str, Count]
    """calls of torch.distributed's collectives, of all ranks together"""
    notes: Annotated[list[Name], at_most(MOST_FINDINGS)]
    """kinds of notes, each once"""
