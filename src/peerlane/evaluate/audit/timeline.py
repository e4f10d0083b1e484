"""Timelines: what every rank did when, in recorded calls of one side, as a file that Perfetto (ui.perfetto.dev) opens.

All ranks of a node stamp their events with the host's clock, into which the profiler converts the GPUs' clocks.
"""

import bisect
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from peerlane.common.files import write_atomically
from peerlane.errors import UsageError
from peerlane.evaluate import wire
from peerlane.evaluate.audit.activity import COMMUNICATION, kernel_kind
from peerlane.evaluate.wire import RoleStamp

HOST_LANE = -1
_MOST_NAMES_SAID = 8
_FIRST_ROLE_TRACK = 1_000
_ONE_CLOCK_NS = 50_000  # offsets closer than this are of ranks that share a GPU
_SAMPLED_STAMPS, _TRIED_ENDS = 400, 64
Kind = Literal["compute", "communication", "both", "host"]


@dataclass(frozen=True)
class Span:
    """One kernel, copy or operator: its rank, its stream (:data:`HOST_LANE` for operators of the host), microseconds since the first."""

    name: str
    rank: int
    lane: int
    kind: Kind
    start_us: float
    end_us: float


@dataclass(frozen=True)
class RoleSpan:
    """An action of one block's role: its name (``wait``, ``compute``, ...), microseconds since the same first span as :class:`Span`."""

    name: str
    rank: int
    role: str
    block: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Shares:
    """The times of one side's spans on the device: microseconds per call on the busiest rank, and shares of that rank's time.

    Attributes:
        us_per_call: from the moment when all ranks have begun to the last span's end, over the number of calls. A profiler delays some
            ranks' first launch, for which the others wait.
        busy_us_per_call: of that, the time in which something runs.
        computing, communicating: shares of that time; a kernel that does both counts in both.
        overlap: share of the communication that something is computed during; 0 without communication.
        idle: share in which nothing runs.
    """

    us_per_call: float
    busy_us_per_call: float
    computing: float
    communicating: float
    overlap: float
    idle: float


@dataclass(frozen=True)
class Timeline:
    """The spans of ``calls`` calls of one side on all ranks. ``labels``: candidate, problem, preset, launch mode, measured time, bound."""

    ranks: int
    calls: int
    spans: tuple[Span, ...]
    labels: dict[str, Any] = field(default_factory=dict)
    roles: tuple[RoleSpan, ...] = ()
    """Spans that kernels of the kit have stamped."""

    @property
    def on_device(self) -> bool:
        """Tells whether spans of a device were recorded; on CPU ranks there are those of the host alone."""
        return any(span.lane != HOST_LANE for span in self.spans)

    @property
    def empty(self) -> bool:
        return not self.spans

    def timed_spans(self, rank: int) -> list[Span]:
        """Returns the spans of the device, or on CPU ranks those of the host."""
        device = self.on_device
        return [span for span in self.spans if span.rank == rank and (span.lane != HOST_LANE) == device]

    @property
    def begun_us(self) -> float:
        """When the last rank begins."""
        return max((min(span.start_us for span in spans) for rank in range(self.ranks) if (spans := self.timed_spans(rank))), default=0.0)

    def shares(self) -> Shares:
        """See :class:`Shares`; raises UsageError if nothing was recorded."""
        begun_us = self.begun_us
        by_rank = []
        for spans in map(self.timed_spans, range(self.ranks)):
            by_rank.append([replace(span, start_us=max(span.start_us, begun_us)) for span in spans if span.end_us > begun_us])
        if not any(by_rank):
            raise UsageError(f"the timeline of {self.labels.get('candidate', 'this side')} is empty: the profiler saw nothing run")
        return max((_shares(spans, self.calls) for spans in by_rank if spans), key=lambda item: item.us_per_call)

    def summary(self) -> str:
        """The shares and the kernels that take longest, in a few lines; raises UsageError if nothing was recorded."""
        found, device = self.shares(), self.on_device
        totals: Counter[tuple[str, str]] = Counter()
        for rank in range(self.ranks):
            for span in self.timed_spans(rank):
                totals[span.name[:80], span.kind] += span.end_us - span.start_us  # type: ignore[assignment]
        names = "kernels and copies" if device else "operators of the host; on CPU ranks nothing else is recorded"
        lines = [
            f"{self.labels['candidate']}, {self.labels['mode']} mode: {found.us_per_call:.1f} us per call on the busiest rank (profiled)",
            f"computes {found.computing:.0%}, communicates {found.communicating:.0%} ({found.overlap:.0%} of that during computation), "
            f"idle {found.idle:.0%}",
            f"longest {names}, us per call and rank:",
        ]
        calls = self.calls * self.ranks
        return "\n".join(
            [*lines, *(f"  {us / calls:9.1f}  {kind:13}  {name}" for (name, kind), us in totals.most_common(_MOST_NAMES_SAID))]
        )

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode())

    @staticmethod
    def read(path: Path) -> "Timeline":
        found = json.loads(path.read_text(encoding="utf-8"))
        return Timeline(
            found["ranks"],
            found["calls"],
            tuple(Span(**span) for span in found["spans"]),
            found["labels"],
            tuple(RoleSpan(**span) for span in found["roles"]),
        )


def timeline_of(
    recordings: Sequence[wire.Recording], calls: int, mechanisms: Mapping[str, Iterable[str]], labels: dict[str, Any]
) -> Timeline:
    """The timeline of what each rank recorded of the same calls.

    ``mechanisms``: of kernels whose code was found, what in it moves data between ranks; such a kernel does both. The kit's collectives
    communicate, like NCCL's.
    """
    from peerlane.device.collectives.kernels import KERNELS  # which needs torch; ranks import this module

    recorded = [(rank, *event) for rank, recording in enumerate(recordings) for event in recording.events or ()]
    begin = min((start for _, _, lane, start, _ in recorded if lane != HOST_LANE), default=None)
    begin = min((start for _, _, _, start, _ in recorded), default=0) if begin is None else begin
    spans = [
        Span(
            name,
            rank,
            lane,
            "communication" if name in KERNELS else _kind(name, lane, mechanisms),
            (start - begin) / 1e3,
            (end - begin) / 1e3,
        )
        for rank, name, lane, start, end in sorted(recorded, key=lambda item: item[3])
    ]
    return Timeline(len(recordings), calls, tuple(spans), labels, _place_roles(recordings, recorded, begin))


def perfetto(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """One Chrome trace of all sides, one below the other: a process per side and rank, a track per stream."""
    events: list[dict[str, Any]] = []
    for side, timeline in enumerate(timelines):
        for rank in range(timeline.ranks):
            pid = side * 1000 + rank
            title = f"{timeline.labels.get('candidate', 'side')} rank {rank}"
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}})
            events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
            lanes = sorted({span.lane for span in timeline.spans if span.rank == rank})
            names = ({"name": "host" if lane == HOST_LANE else f"stream {lane}"} for lane in lanes)
            events += [
                {"ph": "M", "pid": pid, "tid": lane + 1, "name": "thread_name", "args": name}
                for lane, name in zip(lanes, names, strict=True)
            ]
        events += [
            {
                "ph": "X",
                "pid": side * 1000 + span.rank,
                "tid": span.lane + 1,
                "name": span.name,
                "cat": span.kind,
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
            }
            for span in timeline.spans
        ]
        events += _role_events(timeline, side)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"sides": json.dumps([item.labels for item in timelines])}}


def _role_events(timeline: Timeline, side: int) -> Iterator[dict[str, Any]]:
    """A track for every role of every block."""
    tracks = sorted({(span.rank, span.block, span.role) for span in timeline.roles})
    numbers = {track: _FIRST_ROLE_TRACK + number for number, track in enumerate(tracks)}
    for (rank, block, role), number in numbers.items():
        yield {"ph": "M", "pid": side * 1000 + rank, "tid": number, "name": "thread_name", "args": {"name": f"block {block} {role}"}}
    for span in timeline.roles:
        tid = numbers[span.rank, span.block, span.role]
        times = {"ts": span.start_us, "dur": span.end_us - span.start_us}
        yield {"ph": "X", "pid": side * 1000 + span.rank, "tid": tid, "name": span.name, "cat": span.role, **times}


def _place_roles(
    recordings: Sequence[wire.Recording], recorded: Sequence[tuple[int, str, int, int, int]], begin: int
) -> tuple[RoleSpan, ...]:
    """The stamps of all ranks on the clock of the spans. GPUs stamp with clocks of their own, which ranks may share."""
    found = [recording.roles or [] for recording in recordings]
    offsets = {
        rank: _clock_offset(stamps, [(start, end) for other, _, lane, start, end in recorded if other == rank and lane != HOST_LANE])
        for rank, stamps in enumerate(found)
        if stamps
    }
    if offsets and max(offsets.values()) - min(offsets.values()) < _ONE_CLOCK_NS:
        offsets = dict.fromkeys(offsets, int(statistics.median(offsets.values())))
    return tuple(
        RoleSpan(name, rank, role, block, (start + offsets[rank] - begin) / 1e3, (end + offsets[rank] - begin) / 1e3)
        for rank, stamps in enumerate(found)
        for name, role, block, start, end in stamps
    )


def _clock_offset(stamps: Sequence[RoleStamp], kernels: Sequence[tuple[int, int]]) -> int:
    """Nanoseconds from the stamps' clock to that of the kernels: the last stamp ends with a kernel, and most lie inside one."""
    last, sample = max(end for *_, end in stamps), stamps[:: max(1, len(stamps) // _SAMPLED_STAMPS)]
    busy = _union(kernels)
    starts = [start for start, _ in busy]

    def inside(offset: int) -> int:
        places = ((start + offset, end + offset, bisect.bisect_right(starts, start + offset) - 1) for *_, start, end in sample)
        return sum(place >= 0 and end <= busy[place][1] for _, end, place in places)

    ends = sorted({end for _, end in kernels}, reverse=True)[:_TRIED_ENDS]
    return max((end - last for end in ends), key=inside, default=0)


def _kind(name: str, lane: int, mechanisms: Mapping[str, Iterable[str]]) -> Kind:
    if lane == HOST_LANE:
        return "communication" if name.startswith(COMMUNICATION) else "host"
    if kernel_kind(name) == "nccl" or name.startswith("Memcpy PtoP"):
        return "communication"
    return "both" if any(mechanisms.get(name, ())) else "compute"


def _shares(spans: Sequence[Span], calls: int) -> Shares:
    whole = max(span.end_us for span in spans) - min(span.start_us for span in spans)
    computing = _union([(span.start_us, span.end_us) for span in spans if span.kind != "communication"])
    communicating = _union([(span.start_us, span.end_us) for span in spans if span.kind in ("communication", "both")])
    busy = _length(_union([(span.start_us, span.end_us) for span in spans]))
    both = _length(computing) + _length(communicating) - busy
    part = whole or 1.0
    moving = _length(communicating)
    return Shares(whole / calls, busy / calls, _length(computing) / part, moving / part, both / moving if moving else 0.0, 1 - busy / part)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
