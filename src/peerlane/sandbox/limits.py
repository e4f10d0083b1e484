"""What the processes of one candidate may take of the machine: memory, processes, bytes on disk.

The leader of a group looks five times a second at what its descendants hold, and ends the group that holds too much. Between two looks
a candidate can take more; then the kernel's own choice falls on it, because its processes ask to be killed first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from peerlane.sandbox.process_tree import descendants
from peerlane.settings import candidate_memory_bytes

LOOK_S = 0.2
_URGENT = -20
_MEMORY_SHARE, _DISK_SHARE = 0.75, 0.5
_LEAST_MEMORY_BYTES, _LEAST_DISK_BYTES = 2 << 30, 64 << 20
_MOST_PROCESSES = 2048
"""Threads count as well as processes: NCCL, gloo and OpenMP start some dozens for each rank."""


@dataclass(frozen=True)
class Limits:
    """Of all processes of one group together. Travels as JSON.

    Attributes:
        memory_bytes: resident memory that belongs to the processes alone, and what lies in their shared-memory folder.
        processes: processes and threads.
        disk_bytes: written to disk, whatever is left of them.
    """

    memory_bytes: int
    processes: int
    disk_bytes: int

    @classmethod
    def of_machine(cls, scratch: Path) -> Self:
        """Shares of what is free now: of memory, unless a setting says how much, and of the disk that holds ``scratch``."""
        disk = os.statvfs(scratch)
        return cls(
            candidate_memory_bytes() or max(_LEAST_MEMORY_BYTES, int(_available_memory() * _MEMORY_SHARE)),
            _MOST_PROCESSES,
            max(_LEAST_DISK_BYTES, int(disk.f_bavail * disk.f_frsize * _DISK_SHARE)),
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From what ``dataclasses.asdict`` made of one."""
        return cls(int(data["memory_bytes"]), int(data["processes"]), int(data["disk_bytes"]))


class Watch:
    """Looks at the descendants of the process that makes it.

    ``shared_memory``: their own folder of shared memory, if they have one. ``uid``: the user that they will be, or 0: this one."""

    def __init__(self, limits: Limits, shared_memory: str | None, uid: int) -> None:
        self._limits, self._shared_memory, self._uid = limits, shared_memory, uid
        self._inherited, self._before = _taken(os.getpid()).memory_bytes, _visible_processes()
        self._next_look = 0.0

    def enter(self) -> None:
        """Make what the process starts from now on the first to be killed where the machine runs out of memory, and bound a fork bomb.

        The kernel counts a user's processes. So the bound holds where candidates have a user of their own, or that of an ordinary user.
        The process itself goes before all others where it may, to be able to end a bomb."""
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _URGENT)
        uid, most = self._uid or os.getuid(), resource.getrlimit(resource.RLIMIT_NPROC)[1]
        bound = _threads_of_user(uid) + 2 * self._limits.processes
        resource.setrlimit(resource.RLIMIT_NPROC, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))

    def look(self) -> tuple[str, str] | None:
        """The kind of verdict and a sentence with the limit, once the group holds more than it may; looks every ``LOOK_S`` at most."""
        if (now := time.monotonic()) < self._next_look:
            return None
        self._next_look = now + LOOK_S
        limits = self._limits
        if (processes := _visible_processes() - self._before) > limits.processes:  # quickly: a fork bomb leaves this process little time
            processes = len(descendants(os.getpid()))
            if processes > limits.processes:
                return "runtime_error", f"it had {processes} processes; its limit is {limits.processes}"
        held, threads, written = self._in_shared_memory(), 0, 0
        for pid in descendants(os.getpid()):
            process = _taken(pid)
            held += max(0, process.memory_bytes - self._inherited)
            threads, written = threads + process.threads, written + process.written_bytes
        if threads > limits.processes:
            return "runtime_error", f"it had {threads} processes and threads; its limit is {limits.processes}"
        if held > limits.memory_bytes:
            return "out_of_memory", f"it held {held >> 20} MiB of host memory; its limit is {limits.memory_bytes >> 20} MiB"
        if written > limits.disk_bytes:
            return "runtime_error", f"it wrote {written >> 20} MiB to disk; its limit is {limits.disk_bytes >> 20} MiB"
        return None

    def _in_shared_memory(self) -> int:
        if self._shared_memory is None:
            return 0
        with contextlib.suppress(OSError):
            found = os.statvfs(self._shared_memory)
            return (found.f_blocks - found.f_bfree) * found.f_frsize
        return 0


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Taken(NamedTuple):
    memory_bytes: int
    """that no file backs, those that the process has from its parent included"""
    threads: int
    written_bytes: int
    """to disk, those of its children that have ended included"""


def _taken(pid: int) -> _Taken:
    """What a process takes; nothing of what cannot be read."""
    status, written = _fields(f"/proc/{pid}/status", "RssAnon", "Threads"), _fields(f"/proc/{pid}/io", "write_bytes")
    return _Taken(status.get("RssAnon", 0) << 10, status.get("Threads", 0), written.get("write_bytes", 0))


def _fields(file: str, *names: str) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError), open(file) as lines:
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in names}
    return {}


def _visible_processes() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def _threads_of_user(uid: int) -> int:
    """Threads of all processes of a user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == uid:
                count += _taken(int(process.name)).threads
    return count
