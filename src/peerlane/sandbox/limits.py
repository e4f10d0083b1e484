"""Limits of the machine's resources for the processes of one candidate: memory, processes, bytes on disk.

The leader of a group looks five times a second at what its descendants hold, and ends the group that holds too much. Between two looks
a candidate can take more; then the kernel's own choice falls on it, because its processes ask to be killed first.
"""

import contextlib
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from peerlane.sandbox.holdings import File, Memory, available_memory, fields, memory_device, shared_memory_of_machine, stored
from peerlane.sandbox.process_tree import descendants
from peerlane.settings import candidate_memory_bytes

LOOK_S = 0.2
_URGENT = -20
_MEMORY_SHARE, _DISK_SHARE = 0.75, 0.5
_LEAST_MEMORY_BYTES, _LEAST_DISK_BYTES = 2 << 30, 64 << 20
_MOST_FILES = 200_000  # to remove them takes some seconds
_MOST_PROCESSES = 2048
"""Threads count as well as processes: NCCL, gloo and OpenMP start some dozens for each rank."""


@dataclass(frozen=True)
class Limits:
    """The limits of all processes of one group together. Travels as JSON.

    Attributes:
        memory_bytes: memory that no file backs, memory files, page tables, and what lies in their shared-memory folder.
        processes: processes and threads.
        disk_bytes: written to disk, whatever is left of them; and stored there.
        files: and folders, in those that the group may write to.
    """

    memory_bytes: int
    processes: int
    disk_bytes: int
    files: int

    @classmethod
    def of_machine(cls, scratch: Path, sharers: int = 1) -> Self:
        """Shares of what is free now, for one of so many groups that run side by side: of memory, unless a setting says how much, and of
        the disk that holds ``scratch``."""
        disk = os.statvfs(scratch)
        return cls(
            candidate_memory_bytes() or max(_LEAST_MEMORY_BYTES, int(available_memory() * _MEMORY_SHARE / sharers)),
            _MOST_PROCESSES,
            max(_LEAST_DISK_BYTES, int(disk.f_bavail * disk.f_frsize * _DISK_SHARE)),
            _MOST_FILES,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Returns the limits whose ``dataclasses.asdict`` is ``data``."""
        return cls(int(data["memory_bytes"]), int(data["processes"]), int(data["disk_bytes"]), int(data["files"]))


class Watch:
    """Looks at the descendants of the process that makes it.

    ``shared_memory``: their own folder of shared memory, if they have one. ``uid``: the user that they will be, or 0: this one.
    ``folders``: where they keep files.

    The cheap figures come first. They count too much, or what others of the machine take as well. Only if they are beyond a limit, what
    the group itself holds is counted."""

    def __init__(self, limits: Limits, shared_memory: str | None, uid: int, folders: Sequence[str]) -> None:
        self._limits, self._shared_memory, self._uid, self._folders = limits, shared_memory, uid, folders
        self._shared, self._memory_device = shared_memory_of_machine(), memory_device()
        self._known: dict[int, Memory] = {}  # those that were looked at longest ago first
        self._free = {folder: _free(folder) for folder in folders}
        self._next_look = 0.0

    def enter(self) -> None:
        """Make what the process starts from now on the first to be killed where the machine runs out of memory, and bound a fork bomb.

        The kernel counts a user's processes. So the bound holds where candidates have a user of their own, or that of an ordinary user.
        The process itself goes before all others where it may, to be able to end a bomb."""
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _URGENT)
        with contextlib.suppress(OSError):  # a bomb of sessions would leave it one share of thousands
            Path("/proc/self/autogroup").write_text(str(_URGENT))
        uid, most = self._uid or os.getuid(), resource.getrlimit(resource.RLIMIT_NPROC)[1]
        bound = _threads_of_user(uid) + 2 * self._limits.processes
        resource.setrlimit(resource.RLIMIT_NPROC, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))

    def look(self) -> tuple[str, str] | None:
        """The kind of verdict and a sentence with the limit, once the group holds more than it may; looks every ``LOOK_S`` at most."""
        if (now := time.monotonic()) < self._next_look:
            return None
        self._next_look = now + LOOK_S
        limits = self._limits
        if len(pids := descendants(os.getpid())) > limits.processes:  # first: a fork bomb leaves this process little time
            return "runtime_error", f"it had {len(pids)} processes; its limit is {limits.processes}"
        taken = [_taken(pid) for pid in pids]
        if (threads := sum(process.threads for process in taken)) > limits.processes:
            return "runtime_error", f"it had {threads} processes and threads; its limit is {limits.processes}"
        if (held := self._memory_bytes(pids, sum(process.memory_bytes for process in taken))) > limits.memory_bytes:
            return "out_of_memory", f"it held {held >> 20} MiB of host memory; its limit is {limits.memory_bytes >> 20} MiB"
        if (written := sum(process.written_bytes for process in taken)) > limits.disk_bytes:
            return "runtime_error", f"it wrote {written >> 20} MiB to disk; its limit is {limits.disk_bytes >> 20} MiB"
        return self._look_at_disk(pids)

    def _memory_bytes(self, pids: Sequence[int], private: int) -> int:
        """Returns what the group holds, if it may be too much. Looks at some of many processes each time, for that takes milliseconds."""
        self._shared = min(self._shared, now := shared_memory_of_machine())
        if private + now - self._shared <= self._limits.memory_bytes:
            return 0
        end, living = time.monotonic() + LOOK_S / 2, set(pids)
        for pid in (*living.difference(self._known), *(pid for pid in tuple(self._known) if pid in living)):
            if time.monotonic() > end:
                break
            self._known.pop(pid, None)
            self._known[pid] = Memory.of(pid, self._memory_device)
        self._known = {pid: memory for pid, memory in self._known.items() if pid in living}
        files: dict[File, int] = {}
        for memory in self._known.values():
            files |= memory.files
        return sum(memory.private for memory in self._known.values()) + sum(files.values()) + self._in_shared_memory()

    def _look_at_disk(self, pids: Sequence[int]) -> tuple[str, str] | None:
        """Returns the limit of disk that was exceeded. Bytes written miss space that was only reserved, and processes nobody waited for."""
        limits, missing = self._limits, _Space(0, 0)
        for folder, before in self._free.items():
            now = _free(folder)
            self._free[folder] = most = _Space(*map(max, before, now))
            missing = _Space(*map(max, missing, (most.size - now.size, most.files - now.files)))
        if missing.size <= limits.disk_bytes and missing.files <= limits.files:
            return None
        try:
            size, files = stored(self._folders, pids)
        except OSError as error:
            return "runtime_error", f"{missing.size >> 20} MiB of disk are gone, and its folder cannot be read: {error.strerror}"
        if size > limits.disk_bytes:
            return "runtime_error", f"it holds {size >> 20} MiB on disk; its limit is {limits.disk_bytes >> 20} MiB"
        return ("runtime_error", f"it has {files} files; its limit is {limits.files}") if files > limits.files else None

    def _in_shared_memory(self) -> int:
        if self._shared_memory is None:
            return 0
        with contextlib.suppress(OSError):
            found = os.statvfs(self._shared_memory)
            return (found.f_blocks - found.f_bfree) * found.f_frsize
        return 0


class _Space(NamedTuple):
    """Free space of a file system."""

    size: int
    files: int


def _free(folder: str) -> _Space:
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return _Space(found.f_bfree * found.f_frsize, found.f_ffree)
    return _Space(0, 0)


class _Taken(NamedTuple):
    memory_bytes: int
    """that no file backs, and page tables; what the process shares with its parent is included"""
    threads: int
    written_bytes: int
    """to disk, those of its children that have ended and were waited for included"""


def _taken(pid: int) -> _Taken:
    """Returns the resources that a process takes; nothing of what cannot be read."""
    status = fields(f"/proc/{pid}/status", "RssAnon", "VmSwap", "VmPTE", "Threads")
    written = fields(f"/proc/{pid}/io", "write_bytes")
    threads = status.pop("Threads", 0)
    return _Taken(sum(status.values()) << 10, threads, written.get("write_bytes", 0))


def _threads_of_user(uid: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == uid:
                count += _taken(int(process.name)).threads
    return count
