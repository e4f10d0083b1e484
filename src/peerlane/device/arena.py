"""The symmetric arena: one allocation per rank that every rank of a group can read and write.

One allocation, one rendezvous, then sub-allocation by plain counting: ranks that take the same sizes in the same order get the same
offsets, so an offset means the same thing everywhere and the table of base addresses is all a kernel needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from peerlane.errors import DeviceError, DeviceTimeout, UsageError

MAX_RANKS = 8
LINE_BYTES = 128
GRANULARITY_BYTES = 2 << 20
_FAULT_WORDS = 7


class ArenaView(ctypes.Structure):
    """The arena as a kernel argument, by value. Mirrors ``peerlane::Arena`` in ``comm.cuh``."""

    _fields_ = (
        ("base", ctypes.c_uint64 * MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("timeout_ns", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
    )


class Arena:
    """``nbytes`` of zeroed memory on the current device of every rank of ``group`` (default: all ranks), 2 to 8 ranks of one node.

    Creating it is collective and can not be captured in a graph. ``view`` is the kernel argument; ``sm_count`` is the smallest number of
    SMs of any rank, hence the largest grid of one block per SM that is resident everywhere. Waits of kernels that use this arena end after
    ``timeout_s``. ``close()`` gives the memory back; nothing here is collective after creation.
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup | None = None, *, timeout_s: float = 2.0) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UsageError("an arena needs a process group; got none: call torch.distributed.init_process_group first")
        self.rank, self.world_size = group.rank(), group.size()
        if not 2 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"an arena spans 2 to {MAX_RANKS} ranks of one node; this group has {self.world_size}: pass a smaller group")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.nbytes = -(-(nbytes + LINE_BYTES) // GRANULARITY_BYTES) * GRANULARITY_BYTES
        properties = torch.cuda.get_device_properties(self.device)
        seen = _exchange((self.nbytes, properties.multi_processor_count), self.device, group)
        if len({size for size, _ in seen}) != 1:
            raise UsageError(
                f"the ranks ask for arenas of different sizes: {[size for size, _ in seen]} bytes; ask for the same on every rank"
            )
        self.sm_count = min(count for _, count in seen)

        self._memory: torch.Tensor | None = symm_mem.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._handle = symm_mem.rendezvous(self._memory, group)
        self._memory.zero_()
        self._fault = torch.zeros(_FAULT_WORDS, dtype=torch.int32, pin_memory=True)
        # Nobody may write to a peer before the peer's zeroing is done; the exchange waits for it, being queued behind it on its stream.
        _exchange((0, 0), self.device, group)

        bases = self._handle.buffer_ptrs
        shift = self._memory.data_ptr() - bases[self.rank]
        self.view = ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*(base + shift for base in bases)),
            rank=self.rank,
            world_size=self.world_size,
            timeout_ns=int(timeout_s * 1e9),
            fault=self._fault.data_ptr(),
        )
        # The first line belongs to the kernels' fault report.
        self._taken = LINE_BYTES

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        """Offset of ``nbytes`` that nobody else has taken. Every rank takes the same in the same order."""
        offset = -(-self._taken // align) * align
        if offset + nbytes > self.nbytes:
            raise UsageError(
                f"the arena is full: {nbytes} bytes asked for, {self.nbytes - offset} left of {self.nbytes}; create a larger one"
            )
        self._taken = offset + nbytes
        return offset

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own memory at ``offset``, as a tensor."""
        if self._memory is None:
            raise UsageError("the arena is closed; create a new one")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + nbytes].view(dtype).view(*shape)

    def raise_fault(self) -> None:
        """Raise DeviceTimeout if a kernel's wait ran out of time. Works after the CUDA context was lost to the trap."""
        found, rank, source, block, slot, expected, shown = (value & 0xFFFFFFFF for value in self._fault.tolist())
        if found:
            raise DeviceTimeout(
                f"rank {rank} waited for rank {source} longer than {self.view.timeout_ns / 1e9:g} s "
                f"(block {block}, slot {slot}, expected {expected}, seen {shown}); "
                f"see what rank {source} does meanwhile: has it launched the same kernel, with the same grid, on one stream?"
            )

    def close(self) -> None:
        """Give the memory back once the kernels that use it have ended on every rank; the caller sees to that."""
        self._memory = None
        del self._handle


def _exchange(values: tuple[int, int], device: torch.device, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Every rank's two numbers, on every rank; returns after all ranks have called it."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    seen = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(seen, own, group=group)
    pairs = [tuple(value.tolist()) for value in seen]
    if any(len(pair) != 2 for pair in pairs):
        raise DeviceError(f"an exchange of two numbers gave {pairs}; are other collectives in flight on this group?")
    return [(int(first), int(second)) for first, second in pairs]
