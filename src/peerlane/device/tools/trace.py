"""The spans of a kernel's roles on all ranks, as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Kernels compiled with ``defines={"PEERLANE_TIMELINE": 1}`` stamp the start and end of their spans into a ring of device memory:

    timeline = arena.record_timeline(events=1 << 16)      before the arena's view is bound to a launch
    ...launch, synchronise...
    events = timeline.read()                        on every rank; then, on one of them,
    write_trace(path, events_of_all_ranks)

With PEERLANE_ROLES=1 in the environment all kernels are compiled so, and every arena has a ring: `peerlane trace` reads those.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peerlane.device.host.arena import observed
from peerlane.device.host.timeline import Event
from peerlane.device.host.waits import ROLES
from peerlane.errors import UsageError

SPANS = ("store", "load", "reduce", "signal", "wait", "compute", "send")
"""Names of ``peerlane::SpanKind``, in order."""
_ROLES_PER_GROUP = 16  # of observe.cuh


def forget_observed() -> None:
    """Clears the rings of all observed arenas."""
    for timeline in observed:
        timeline.clear()


def observed_spans(most: int) -> list[list[Any]]:
    """Returns the latest ``most`` spans of all observed arenas: name, role, block, start and end in nanoseconds of the GPU's clock."""
    pairs = sorted((pair for timeline in observed for pair in _spans(timeline.read())), key=lambda pair: pair[1].nanoseconds)
    return [[_kind(begin.kind, {}), _role(begin.role), begin.block, begin.nanoseconds, end.nanoseconds] for begin, end in pairs[-most:]]


def trace(
    ranks: Sequence[Sequence[Event]], *, names: Mapping[int, str] | None = None, offsets_ns: Sequence[int] | None = None
) -> dict[str, Any]:
    """Returns the Chrome trace of all ranks: a process per rank, a track per role and block. ``names`` are those of the kernel's own spans.

    GPUs' clocks may differ: ``offsets_ns[r]`` is added to rank r's. Spans whose start or end was overwritten are left out.
    """
    offsets = offsets_ns if offsets_ns is not None else [0] * len(ranks)
    if len(offsets) != len(ranks):
        raise UsageError(f"{len(offsets)} clock offsets for {len(ranks)} ranks; expected one for each")
    start = min((event.nanoseconds + offset for events, offset in zip(ranks, offsets, strict=True) for event in events), default=0)
    trace_events: list[dict[str, Any]] = []
    for rank, (events, offset) in enumerate(zip(ranks, offsets, strict=True)):
        trace_events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        tracks = {(event.role, event.block) for event in events}
        for role, block in sorted(tracks):
            track = {"name": f"block {block} {_role(role)}"}
            trace_events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": _track(role, block), "args": track})
        for begin, end in _spans(events):
            trace_events.append(
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
    return {"displayTimeUnit": "ns", "traceEvents": trace_events}


def write_trace(path: Path, ranks: Sequence[Sequence[Event]], **options: Any) -> None:
    """Writes :func:`trace` as a JSON file."""
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
