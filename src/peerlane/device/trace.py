"""What the roles of a kernel did when, on all ranks, as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Kernels compiled with ``defines={"PEERLANE_TIMELINE": 1}`` stamp the start and end of their spans into a ring of device memory:

    timeline = Timeline(arena, events=1 << 16)      before the arena's view is bound to a launch
    ...launch, synchronise...
    events = timeline.read()                        on every rank; then, on one of them,
    write_trace(path, events_of_all_ranks)

With PEERLANE_ROLES=1 in the environment all kernels are compiled so, and every arena has a ring: `peerlane trace` reads those.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peerlane.device.arena import ROLES, Arena
from peerlane.errors import UsageError

SPANS = ("store", "load", "reduce", "signal", "wait", "compute", "send")
"""Names of ``peerlane::SpanKind``, in order."""
EVENT_BYTES = 16
OBSERVED_EVENTS = 1 << 18
_ROLES_PER_GROUP = 16  # of observe.cuh


@dataclass(frozen=True)
class Event:
    """One stamp: nanoseconds of the GPU's clock, role and block, the kind of span, and whether it ends there."""

    nanoseconds: int
    role: int
    block: int
    kind: int
    end: bool


class Timeline:
    """The ring in which kernels that use ``arena`` leave their last ``events`` stamps. Launches bound before it was made leave none."""

    def __init__(self, arena: Arena, events: int = 1 << 16) -> None:
        if events < 1:
            raise UsageError(f"a timeline of {events} events; expected a positive number")
        self._memory = torch.zeros((events + 1) * EVENT_BYTES, dtype=torch.uint8, device=arena.device)
        arena.view.timeline = self._memory.data_ptr()
        arena.view.timeline_events = events

    def read(self) -> list[Event]:
        """What has been stamped so far, oldest first; waits for the device."""
        return decode(self._memory.cpu().numpy().tobytes())

    def clear(self) -> None:
        """Forget all stamps."""
        self._memory.zero_()


_observed: list[Timeline] = []


def observe(arena: Arena) -> None:
    """Gives an arena a ring that :func:`observed_spans` reads."""
    _observed.append(Timeline(arena, OBSERVED_EVENTS))


def forget_observed() -> None:
    """Clears the rings of all observed arenas."""
    for timeline in _observed:
        timeline.clear()


def observed_spans(most: int) -> list[list[Any]]:
    """The latest ``most`` spans of all observed arenas: name, role, block, start and end in nanoseconds of the GPU's clock."""
    pairs = sorted((pair for timeline in _observed for pair in _spans(timeline.read())), key=lambda pair: pair[1].nanoseconds)
    return [[_kind(begin.kind, {}), _role(begin.role), begin.block, begin.nanoseconds, end.nanoseconds] for begin, end in pairs[-most:]]


def decode(ring: bytes) -> list[Event]:
    """The stamps of a ring, in the order of their times. The first 16 bytes count how many have been made; older ones were overwritten."""
    (made,) = struct.unpack_from("<I", ring)
    kept = min(made, len(ring) // EVENT_BYTES - 1)
    found = []
    for index in range(1, kept + 1):
        nanoseconds, who, what = struct.unpack_from("<QII", ring, index * EVENT_BYTES)
        found.append(Event(nanoseconds, who >> 24, who & 0xFFFFFF, what >> 1, bool(what & 1)))
    # A span of no length ends after it has begun.
    return sorted(found, key=lambda event: (event.nanoseconds, event.end))


def trace(
    ranks: Sequence[Sequence[Event]], *, names: Mapping[int, str] | None = None, offsets_ns: Sequence[int] | None = None
) -> dict[str, Any]:
    """The Chrome trace of all ranks: a process per rank, a track per role and block. ``names`` are those of the kernel's own spans.

    GPUs' clocks may differ: ``offsets_ns[r]`` is added to rank r's. Spans whose start or end was overwritten are left out.
    """
    offsets = offsets_ns if offsets_ns is not None else [0] * len(ranks)
    if len(offsets) != len(ranks):
        raise UsageError(f"{len(offsets)} clock offsets for {len(ranks)} ranks; expected one for each")
    start = min((event.nanoseconds + offset for events, offset in zip(ranks, offsets, strict=True) for event in events), default=0)
    found: list[dict[str, Any]] = []
    for rank, (events, offset) in enumerate(zip(ranks, offsets, strict=True)):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        tracks = {(event.role, event.block) for event in events}
        for role, block in sorted(tracks):
            track = {"name": f"block {block} {_role(role)}"}
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": _track(role, block), "args": track})
        for begin, end in _spans(events):
            found.append(
                {
                    "ph": "X",
                    "name": _kind(begin.kind, names or {}),
                    "cat": _role(begin.role),
                    "pid": rank,
                    "tid": _track(begin.role, begin.block),
                    "ts": (begin.nanoseconds + offset - start) / 1000,
                    "dur": (end.nanoseconds - begin.nanoseconds) / 1000,
                }
            )
    return {"displayTimeUnit": "ns", "traceEvents": found}


def write_trace(path: Path, ranks: Sequence[Sequence[Event]], **options: Any) -> None:
    """:func:`trace` as a JSON file."""
    path.write_text(json.dumps(trace(ranks, **options)))


def _spans(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Pairs of start and end. The spans of a track are nested, so an end closes the last start of its kind."""
    open_spans: dict[tuple[int, int, int], list[Event]] = {}
    for event in events:
        started = open_spans.setdefault((event.role, event.block, event.kind), [])
        if not event.end:
            started.append(event)
        elif started:
            yield started.pop(), event


def _role(role: int) -> str:
    group, role = divmod(role, _ROLES_PER_GROUP)
    name = ROLES[role] if role < len(ROLES) else f"role {role}"
    return f"{name} {group}" if group else name


def _kind(kind: int, names: Mapping[int, str]) -> str:
    return SPANS[kind] if kind < len(SPANS) else names.get(kind, f"span {kind}")


def _track(role: int, block: int) -> int:
    return block * 256 + role
