"""The profiler around audited calls, on a candidate's rank, and the number of collectives that process groups have counted.

Everything that runs while candidate code is present is bound at import, which happens before. A candidate shares the process and can still
get at the profiler from native code; what can be seen from outside is that the marks at both ends are missing.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from peerlane import settings
from peerlane.device.host import tally
from peerlane.device.tools import trace
from peerlane.evaluate import wire
from peerlane.evaluate.audit import monkeypatch_check
from peerlane.evaluate.audit.timeline import HOST_LANE
from peerlane.evaluate.wire import MOST_EVENTS, MOST_MARKS, MOST_NAMES, NAME_CHARACTERS

_front: Any = torch.autograd.profiler
_Activity, _Settings, _KINETO, _CPU = _front.ProfilerActivity, _front.ProfilerConfig, _front.ProfilerState.KINETO, _front.DeviceType.CPU
_prepare, _enable, _disable = _front._prepare_profiler, _front._enable_profiler, _front._disable_profiler
_Configuration = torch._C._profiler._ExperimentalConfig
_Mark = torch._C._profiler._RecordFunctionFast
_synchronize = torch.cuda.synchronize
_world = _c10d._world
_sequence = dist.ProcessGroup._get_sequence_number_for_group  # type: ignore[attr-defined]

_WATCHED: dict[str, tuple[Any, str, Any]] = {
    f"{owner.__name__}.{name}": (owner, name, getattr(owner, name))
    for owner, names in (
        (torch.autograd, ("_prepare_profiler", "_enable_profiler", "_disable_profiler")),
        (_front, ("_prepare_profiler", "_enable_profiler", "_disable_profiler", "profile", "record_function")),
        (torch.profiler, ("profile",)),
        (torch._C._profiler, ("_RecordFunctionFast", "_ExperimentalConfig")),
    )
    for name in names
}


def replaced() -> list[str]:
    """The profiler's functions that are not what they were at import."""
    return [label for label, (owner, name, original) in _WATCHED.items() if getattr(owner, name, None) is not original]


def collectives() -> int:
    """Returns how many collectives the process groups of this rank have counted. Costs microseconds; sees no other library's."""
    total = 0
    for group in list(_world.pg_map):
        with contextlib.suppress(Exception):  # backends that do not count
            total += _sequence(group)
    return total + tally.total()  # the groups of the backend peerlane count by themselves


class Recording:
    """The events between the two ends of :func:`recording`: see :class:`wire.Recording` for its parts."""

    def __init__(self, marker: str = "") -> None:
        self._marker = marker
        self.host: dict[str, int] = {}
        self.device: dict[str, int] = {}
        self.collectives, self.functions = 0, 0
        self.marks, self.replaced = list[str](), list[str]()
        self.events: list[tuple[str, int, int, int]] | None = None
        self.roles: list[tuple[str, str, int, int, int]] | None = None

    def result(self) -> wire.Recording:
        """Returns the recording that the supervisor gets."""
        return wire.Recording(self.host, self.device, self.marks, self.collectives, self.functions, self.replaced, self.events, self.roles)

    def mark_calls(self) -> AbstractContextManager[Any]:
        """Returns a context. If it is entered, a timeline keeps only the device's work for launches inside it."""
        return _Mark(f"{self._marker}:calls")

    def keep(self, events: list[Any], marker: str, before: int, after: int) -> None:
        """Counts the events' names: ``host`` and ``device``; ``marks`` are those among them, which the supervisor judges."""
        host: Counter[str] = Counter()
        device: Counter[str] = Counter()
        for event in events:
            if event.device_type() == _CPU:
                host[event.name()[:NAME_CHARACTERS]] += 1
            elif not event.is_user_annotation():
                device[event.name()[:NAME_CHARACTERS]] += 1
        host.pop(f"{marker}:calls", 0)
        for name in [name for name in host if name.startswith(f"{marker}:")]:
            self.marks += [name] * min(host.pop(name), MOST_MARKS)
        del self.marks[MOST_MARKS:]
        self.host, self.device = dict(host.most_common(MOST_NAMES)), dict(device.most_common(MOST_NAMES))
        self.collectives = after - before
        self.functions = monkeypatch_check.remembered()
        self.replaced = [*replaced(), *monkeypatch_check.replaced()]

    def keep_events(self, events: list[Any], marker: str) -> None:
        """Adds ``events``: name, lane (the stream, or that of the host), start and end in nanoseconds of the host's clock.

        Of launches before the mark of :meth:`mark_calls`, such as those of the barrier in front of a block, there are none.
        """
        found: list[tuple[str, int, int, int]] = []
        begin_ns = next((event.start_ns() for event in events if event.name() == f"{marker}:calls" and event.device_type() == _CPU), 0)
        launches = {  # calls of the CUDA runtime and driver; operators are numbered by themselves
            event.correlation_id(): event.start_ns() for event in events if event.device_type() == _CPU and event.name().startswith("cu")
        }
        for event in events:
            name, on_host = event.name()[:NAME_CHARACTERS], event.device_type() == _CPU
            if event.is_user_annotation() or name.startswith(marker):
                continue
            start = event.start_ns()
            if (start if on_host else launches.get(event.correlation_id(), start)) < begin_ns:
                continue
            found.append((name, HOST_LANE if on_host else int(event.device_resource_id()), start, start + event.duration_ns()))
        found.sort(key=lambda event: (event[1] == HOST_LANE, event[2]))  # if there are too many, those of the host go
        self.events = found[:MOST_EVENTS]


@contextlib.contextmanager
def recording(device: torch.device, marker: str, *, timeline: bool = False) -> Iterator[Recording]:
    """Records all threads' operators and, on a GPU, what the device does, until everything that was launched has ended.

    ``marker``: a word that nobody can know beforehand, set at both ends. ``timeline``: the events themselves are kept too.
    """
    result = Recording(marker)
    on_gpu = device.type == "cuda"
    activities = {_Activity.CPU, _Activity.CUDA} if on_gpu else {_Activity.CPU}
    if on_gpu:
        _synchronize()
    if timeline and settings.records_roles():
        trace.forget_observed()
        _synchronize()
    configuration = _Settings(_KINETO, False, False, False, False, False, _Configuration(profile_all_threads=True))
    _prepare(configuration, activities)
    _enable(configuration, activities)
    before = collectives()
    try:
        with _Mark(f"{marker}:begin"):
            pass
        yield result
        if on_gpu:
            _synchronize()
        with _Mark(f"{marker}:end"):
            pass
    finally:
        after = collectives()
        events = _disable().events()
    result.keep(events, marker, before, after)
    if timeline:
        result.keep_events(events, marker)
        if settings.records_roles():
            result.roles = [(name, role, block, start, end) for name, role, block, start, end in trace.observed_spans(MOST_EVENTS)]
