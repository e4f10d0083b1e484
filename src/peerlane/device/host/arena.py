"""The symmetric arena: memory of every rank that every rank of a group can read and write.

One piece of it, then sub-allocation by plain counting (``layout.py``), so that an offset means the same thing everywhere and the table of
base addresses is all a kernel needs. Where the memory comes from is the group's business: on GPUs it is a part of a pool (``pool.py``).
"""

import ctypes
from collections.abc import Callable, Sequence
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
from peerlane.device.host.waits import WaitRecord, describe_fault
from peerlane.errors import DeviceTimeout, UsageError


class RemoteView(ctypes.Structure):
    """The memory of the second tier, which other ranks reach by messages alone: ``Remote`` of remote.cuh.

    ``own`` is the address of this rank's part, ``stride`` the distance from rank to rank in the emulator; on GPUs it is 0.
    """

    _fields_ = (("own", ctypes.c_uint64), ("stride", ctypes.c_uint64), ("rank", ctypes.c_uint32), ("world_size", ctypes.c_uint32))


class ArenaView(ctypes.Structure):
    """The arena as a kernel argument, by value. Mirrors ``peerlane::Arena`` in ``arena.cuh``."""

    _fields_ = (
        ("base", ctypes.c_uint64 * MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("stop", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("timeline", ctypes.c_uint64),
        ("timeline_events", ctypes.c_uint64),
    )

    before_launch: Callable[[], object] | None = None
    """What a launch with this argument calls first, if anything. No part of what the kernel gets."""
    group: Group | None = None
    """Whose ranks it waits for; no part of it either."""


class Arena:
    """``nbytes`` of zeroed memory on every rank of ``group`` (default: all ranks), 1 to 8 ranks of one node.

    Creating it is collective and can not be captured in a graph. ``view`` is the kernel argument; ``sm_count`` is the smallest number of
    SMs of any rank, hence the largest grid of one block per SM that is resident everywhere. Waits of kernels that use this arena end after
    ``timeout_s``, or later where ranks share a device; by default after the group's limit. Several kernels may share an arena, each with
    parts of its own. ``close()`` (or leaving a ``with``) gives the memory back, in the same order on every rank; nothing here is collective
    after creation but ``seal()``.

    ``name``: of the kernel that uses it, for the report of a wait that ran out of time.
    """

    def __init__(
        self, nbytes: int, group: Group | dist.ProcessGroup | None = None, *, timeout_s: float | None = None, name: str = ""
    ) -> None:
        self.name, self.group, self.closed = name, group_of(group), False
        group = self.group
        self.rank, self.world_size, self.sm_count, self.device = group.rank, group.world_size, group.sm_count, group.device
        group.cache.make_room(group.exchange)
        self._memory = group.allocate(nbytes, name)
        self.layout = self._memory.layout
        self.nbytes = self.layout.nbytes
        self.view = ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*self._memory.bases),
            rank=self.rank,
            world_size=self.world_size,
            stop=group.waits.stop_address or self._memory.fault + WaitRecord.stop.offset,
            fault=self._memory.fault,
        )
        self.view.group = group
        self.record, self.follows = self._memory.record, timeout_s is None
        group.waits.add(self, None if timeout_s is None else group.wait_limit_s(timeout_s))
        self._entry = group.cache.own(self)
        if self._entry is not None and not self._entry.stays:
            self.view.before_launch = self._stay_if_captured
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
        """This rank's own memory at ``offset``, as a tensor. Not to be used after ``close()``, nor once the arena made room for others."""
        if self.closed and self.view.before_launch is not None:
            self.view.before_launch()
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
        return describe_fault(self.record, self.name)

    def close(self) -> None:
        """Give the memory back, to the group: it is used again once no kernel of any rank uses it. May be called twice. Launches with this
        arena raise UsageError from now on."""
        self._refuse(f"the arena{f' of {self.name}' if self.name else ''} is closed; create a new one")

    def evict(self) -> None:
        """The same, for an arena that made room for others in the group's cache."""
        self._refuse(f"{self.name or 'this kernel'} made room for kernels that were used later; look it up in each call, do not keep it")

    def _refuse(self, reason: str) -> None:
        def refuse() -> None:
            raise UsageError(reason)

        if not self.closed:
            self.closed, self.view.before_launch = True, refuse
            self._memory.close()

    def belong_to(self, other: "Arena") -> None:
        """Close this arena too when what keeps ``other`` goes, or is closed."""
        if other._entry is not None:
            other._entry.arenas.append(self)

    def stay(self) -> None:
        """Never make room for others: the addresses are known where no launch can ask whether the arena is closed."""
        if self._entry is not None:
            self._entry.stays = True

    def _stay_if_captured(self) -> None:
        if self.group.cache.captures():
            self.stay()
            self.view.before_launch = None

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
