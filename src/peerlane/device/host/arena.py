"""The symmetric arena: one allocation per rank that every rank of a group can read and write.

One allocation, then sub-allocation by plain counting (``layout.py``), so that an offset means the same thing everywhere and the table of
base addresses is all a kernel needs. How the memory is shared is the group's business (``group.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.device.host.group import MAX_RANKS, Group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.layout import LINE_BYTES, LayoutRecord, check_layouts
from peerlane.device.host.timeline import Timeline
from peerlane.errors import DeviceTimeout, UsageError

ROLES = ("block", "loader", "consumer", "storer", "communicator")
"""Names of ``peerlane::Role``, in order."""


class ArenaView(ctypes.Structure):
    """The arena as a kernel argument, by value. Mirrors ``peerlane::Arena`` in ``arena.cuh``."""

    _fields_ = (
        ("base", ctypes.c_uint64 * MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("timeout_ns", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("timeline", ctypes.c_uint64),
        ("timeline_events", ctypes.c_uint64),
    )


class Arena:
    """``nbytes`` of zeroed memory on every rank of ``group`` (default: all ranks), 2 to 8 ranks of one node.

    Creating it is collective and can not be captured in a graph. ``view`` is the kernel argument; ``sm_count`` is the smallest number of
    SMs of any rank, hence the largest grid of one block per SM that is resident everywhere. Waits of kernels that use this arena end after
    ``timeout_s``, or later where ranks share a device. Several kernels may share an arena, each with parts of its own. ``close()`` (or
    leaving a ``with``) gives the memory back; nothing here is collective after creation but ``seal()``.

    ``name``: of the kernel that uses it, for the report of a wait that ran out of time.
    """

    def __init__(self, nbytes: int, group: Group | dist.ProcessGroup | None = None, *, timeout_s: float = 2.0, name: str = "") -> None:
        self.name, self.group = name, group_of(group)
        group = self.group
        self.rank, self.world_size, self.sm_count, self.device = group.rank, group.world_size, group.sm_count, group.device
        if self.world_size < 2:
            raise UsageError(f"an arena spans 2 to {MAX_RANKS} ranks of one node; this group has {self.world_size}: pass another group")
        check_sizes(group.exchange(nbytes))
        self._memory = group.allocate(nbytes)
        self.layout = self._memory.layout
        self.nbytes = self.layout.nbytes
        self.view = ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*self._memory.bases),
            rank=self.rank,
            world_size=self.world_size,
            timeout_ns=int(group.wait_limit_s(timeout_s) * 1e9),
            fault=self._memory.fault,
        )
        if settings.records_roles() and self.device.type == "cuda":
            observed.append(self.record_timeline(_OBSERVED_EVENTS))
        _arenas.add(self)

    def take(self, nbytes: int, *, align: int = LINE_BYTES, name: str = "") -> int:
        """Offset of ``nbytes`` that nobody else has taken. Every rank takes the same in the same order; ``seal`` sees to it.

        The emulator's findings have the name."""
        return self.layout.take(nbytes, align=align, name=name)

    def seal(self) -> None:
        """Collective: raise UsageError, on every rank, unless all have taken the same so far. More may be taken afterwards, and sealed."""
        own = self.layout.record()
        check_layouts([LayoutRecord(*record) for record in self.group.exchange([own.takes, own.taken, own.fingerprint])])

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own memory at ``offset``, as a tensor. Not to be used after ``close()``."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not any(start <= offset and offset + nbytes <= start + length for start, length in self.layout.parts):
            raise UsageError(f"{nbytes} bytes at {offset} do not lie in a part of the arena; pass an offset that take() gave")
        return self._memory.tensor(offset, nbytes).view(dtype).view(*shape)

    def record_timeline(self, events: int = 1 << 16) -> Timeline:
        """Let kernels that are bound to this arena from now on leave their last ``events`` stamps, if they are compiled to do so."""
        timeline = Timeline(events, self.device)
        self.view.timeline, self.view.timeline_events = timeline.address, events
        return timeline

    def raise_fault(self) -> None:
        """Raise DeviceTimeout if a kernel's wait ran out of time. Works after the CUDA context was lost to the trap."""
        if message := self.fault():
            raise DeviceTimeout(message)

    def fault(self) -> str:
        """What a kernel's wait that ran out of time has reported; empty if none did. Works after the CUDA context was lost to the trap."""
        return describe_fault(self._memory.fault_words(), self.view.timeout_ns, self.name)

    def close(self) -> None:
        """Give the memory back once the kernels that use it have ended on every rank; the caller sees to that. May be called twice."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_arenas: WeakSet[Arena] = WeakSet()
_OBSERVED_EVENTS = 1 << 18
observed: list[Timeline] = []
"""The timelines of all arenas of this process, if ``settings.records_roles()``."""


def faults() -> list[str]:
    """What waits that ran out of time have reported in this process, one sentence for each arena. For whoever finds the device lost."""
    return [message for arena in list(_arenas) if (message := arena.fault())]


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise UsageError unless all ranks ask for an arena of one size."""
    if len(set(sizes)) != 1:
        raise UsageError(f"the ranks ask for arenas of different sizes: {list(sizes)} bytes; ask for the same on every rank")


def describe_fault(words: Sequence[int], timeout_ns: int, kernel: str = "") -> str:
    """What the words of a fault record say, or an empty string if none was written."""
    found, rank, role, source, block, slot, expected, seen = (word & 0xFFFFFFFF for word in words)
    if not found:
        return ""
    name = ROLES[role] if role < len(ROLES) else f"role {role}"
    return (
        f"{f'{kernel}: ' if kernel else ''}rank {rank} ({name}) waited for rank {source} longer than {timeout_ns / 1e9:g} s "
        f"(block {block}, slot {slot}, expected {expected}, seen {seen}); "
        f"see what rank {source} does meanwhile: has it launched the same kernel, with the same grid, on one stream?"
    )
