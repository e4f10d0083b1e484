"""Findings of the emulator: what threads did, where, and what it means. Findings of the same lines are told as one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

_MOST_SIDES = 16
_MOST_PLACES = 8

MEANINGS = {
    "race": "nothing orders the two: release after the first and acquire before the second, in a scope that spans both threads",
    "race:read_only": "a load by ld.global.nc may be stale, also behind an acquire: drop const __restrict__ or __ldg where a launch writes",
    "launch_boundary": "ordered only if the end of a launch is a release for the whole system and an acquire of what was seen; vLLM and "
    "others rely on it, PTX does not promise it: st.release and ld.acquire here",
    "same_value": "both write the same value, so no thread sees another; PTX leaves it open",
    "uninitialised_read": "nobody has written this memory: what torch.empty and shared memory hold at first is not known",
    "uninitialised_symmetric": "nobody has written this memory: symm_mem.empty gives zeros today, and does not promise them: zero it",
    "lost_update": "both write the same flag, nothing orders them and one is lost: let flags only grow, each with one writer or by adding",
    "proxy_fence": "the asynchronous copy may miss the write: fence_proxy_async after what orders the two, before the copy is started",
    "deadlock": "nobody can go on",
    "trap": "a kernel stopped itself",
    "illegal_address": "memory that this thread may not use",
    "misaligned_address": "a GPU stops here: the address of an access must be a multiple of its size (16 for float4 and bulk copies)",
    "unfinished_copy": "the block ended while a copy may still use its shared memory: wait for it first",
    "wrong_result": "the memory does not hold what was expected",
    "order_of_atomics": "what is written depends on the order of atomics, as sums of floats do: right if each order gives a right result",
    "barrier": "all threads of a block, or of a mask, must come to the same barrier, with the same arguments: move it out of the branch",
    "misuse": "a barrier is used against its rules",
    "crash": "the device code crashed: look for a null pointer or an index out of range",
    "endless": "the launches do not end: look for a loop without an end, or one that polls memory without ptx:: loads or volatile",
}


LAUNCH_BOUNDARY = "launch_boundary"
ORDER = "order_of_atomics"
NOTES = frozenset({LAUNCH_BOUNDARY, ORDER, "same_value", "uninitialised_symmetric"})
"""Kinds that are reported, but are no errors."""


class RaceNote(UserWarning):
    """A note of the emulator, as a warning of a test."""


@dataclass(frozen=True)
class Place:
    """Bytes ``begin`` to ``end`` of a rank's part of some memory."""

    memory: str
    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class Frame:
    """A source line; several make the chain of calls that ends there, innermost first."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Side:
    """One thread's part in a finding."""

    rank: int
    launch: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    action: str
    frames: tuple[Frame, ...]
    at: str
    """the memory that a stuck thread looks at, in words"""

    def __str__(self) -> str:
        where = f"rank {self.rank}, launch {self.launch}, block {_short(self.block)}, thread {_short(self.thread)}"
        chain = " <- ".join(f"{frame.file}:{frame.line}" for frame in self.frames) or "unknown line"
        return f"{where} {self.action}{' at ' + self.at if self.at else ''}: {chain}"


@dataclass(frozen=True)
class Finding:
    """An error, and in how many of the schedules it was seen."""

    kind: str
    detail: str
    memory: str
    """the bytes concerned, in words; empty if there are none"""
    sides: tuple[Side, ...]
    schedule: int
    """the first that showed it; run it alone with ``check(scenario, schedules=1, first_schedule=...)``"""
    schedules: int
    places: tuple[Place, ...] = ()
    """all bytes that it was seen at, some of them if they are many"""
    why: str = ""
    """which of MEANINGS it has, if not that of its kind"""

    @property
    def meaning(self) -> str:
        """The finding's meaning, and what to do."""
        return MEANINGS[self.why or self.kind]

    @property
    def summary(self) -> str:
        """One line: what every side does, and in which line of the kernel."""
        acts = [
            f"rank {side.rank} {side.action}{f' in {side.frames[-1].file}:{side.frames[-1].line}' if side.frames else ''}"
            for side in self.sides
        ]
        return f"{', '.join(acts) or self.detail}: {self.meaning}"

    def __str__(self) -> str:
        head = f"{self.kind}{': ' + self.memory if self.memory else ''} (in {self.schedules} schedules, first in {self.schedule})"
        sides = [f"  {side}" for side in self.sides[:_MOST_SIDES]]
        if len(self.sides) > _MOST_SIDES:
            sides.append(f"  and {len(self.sides) - _MOST_SIDES} more")
        return "\n".join([head, *sides, *([f"  {self.detail}"] if self.detail else []), f"  {self.meaning}"])

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """The kernel's lines of the first two sides, in the order of the file: findings of the same lines are one bug."""
        return tuple(sorted({(side.frames[-1].file, side.frames[-1].line) for side in self.sides[:2] if side.frames}))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings with those of one kind and the same lines as one, whose memory is that of all."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        same: object = finding.lines or tuple(sorted({place.memory for place in finding.places})) or finding.detail
        groups.setdefault((finding.kind, finding.why, same), []).append(finding)
    return [_as_one(group) for group in groups.values()]


def as_races(notes: Iterable[Finding]) -> list[Finding]:
    """Returns those of the notes as races that are about the ends of launches."""
    return [replace(note, kind="race", why=LAUNCH_BOUNDARY) for note in notes if note.kind == LAUNCH_BOUNDARY]


def _as_one(group: list[Finding]) -> Finding:
    first = group[0]
    places = _joined(place for finding in group for place in finding.places)
    memory = first.memory
    if len(places) > 1 or (places and len(group) > 1):
        memory = _described(places)
    return replace(
        first,
        memory=memory,
        schedule=min(finding.schedule for finding in group),
        schedules=max(finding.schedules for finding in group),
        places=places[:_MOST_PLACES],
    )


def _joined(places: Iterable[Place]) -> tuple[Place, ...]:
    """Returns ranges that touch as one; beyond some of a memory, from the first to the last."""
    by_memory: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        by_memory.setdefault((place.memory, place.rank), []).append(place)
    joined: list[Place] = []
    for same in by_memory.values():
        ranges: list[Place] = []
        for place in sorted(same, key=lambda place: place.begin):
            if ranges and place.begin <= ranges[-1].end:
                ranges[-1] = replace(ranges[-1], end=max(ranges[-1].end, place.end))
            else:
                ranges.append(place)
        joined += ranges if len(ranges) <= _MOST_PLACES // 2 else [replace(ranges[0], end=ranges[-1].end)]
    return tuple(joined)


def _described(places: Iterable[Place]) -> str:
    """Describes memory in words, ranks with the same bytes together."""
    ranks: dict[tuple[str, int, int], list[int]] = {}
    for place in places:
        ranks.setdefault((place.memory, place.begin, place.end), []).append(place.rank)
    said = [f"{memory}+{begin} to +{end}{_of(sorted(set(found)))}" for (memory, begin, end), found in list(ranks.items())[:_MOST_PLACES]]
    return ", ".join(said) + (f" and {len(ranks) - _MOST_PLACES} more ranges" if len(ranks) > _MOST_PLACES else "")


def _of(ranks: list[int]) -> str:
    if ranks[0] < 0:
        return ""
    return f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {', '.join(map(str, ranks))}"


def _short(three: tuple[int, int, int]) -> str:
    x, y, z = three
    return str(x) if y == z == 0 else f"({x}, {y}, {z})"
