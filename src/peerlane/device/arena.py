"""The symmetric arena: one allocation per rank that every rank of a group can read and write.

One allocation, one exchange of handles, then sub-allocation by plain counting (``layout.py``), so that an offset means the same thing
everywhere and the table of base addresses is all a kernel needs. Memory is shared by CUDA IPC, which works for any group of one node and
never touches NVLink multicast.
"""

from __future__ import annotations

import ctypes
import socket
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from peerlane.device import _cuda
from peerlane.device.layout import LINE_BYTES, Layout, LayoutRecord, check_layouts
from peerlane.errors import DeviceError, DeviceTimeout, UsageError

MAX_RANKS = 8
GRANULARITY_BYTES = 2 << 20
ROLES = ("block", "loader", "consumer", "storer", "communicator")
"""Names of ``peerlane::Role``, in order."""
FAULT_WORDS = 8
_HANDLE_BYTES = 64


class ArenaView(ctypes.Structure):
    """The arena as a kernel argument, by value. Mirrors ``peerlane::Arena`` in ``arena.cuh``."""

    _fields_ = (
        ("base", ctypes.c_uint64 * MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("timeout_ns", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("multicast", ctypes.c_uint64),
        ("timeline", ctypes.c_uint64),
        ("timeline_events", ctypes.c_uint64),
    )


class Arena:
    """``nbytes`` of zeroed memory on the current device of every rank of ``group`` (default: all ranks), 2 to 8 ranks of one node.

    Creating it is collective and can not be captured in a graph. ``view`` is the kernel argument; ``sm_count`` is the smallest number of
    SMs of any rank, hence the largest grid of one block per SM that is resident everywhere. Waits of kernels that use this arena end after
    ``timeout_s``. Several kernels may share an arena, each with parts of its own. ``close()`` (or leaving a ``with``) gives the memory
    back; nothing here is collective after creation but ``seal()``.
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup | None = None, *, timeout_s: float = 2.0) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UsageError("an arena needs a process group; got none: call torch.distributed.init_process_group first")
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        if not 2 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"an arena spans 2 to {MAX_RANKS} ranks of one node; this group has {self.world_size}: pass another group")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.nbytes = -(-(nbytes + LINE_BYTES) // GRANULARITY_BYTES) * GRANULARITY_BYTES
        properties = torch.cuda.get_device_properties(self.device)
        host = zlib.crc32(socket.gethostname().encode())
        seen = self._exchange((self.nbytes, properties.multi_processor_count, host))
        check_members([size for size, _, _ in seen], [name for _, _, name in seen])
        self.sm_count = min(count for _, count, _ in seen)
        self.layout = Layout(self.nbytes, reserved=LINE_BYTES)  # the first line belongs to the kernels' fault report

        self._opened: dict[int, Any] = {}
        self._own = _checked(_cuda.driver().cuMemAlloc(self.nbytes), f"allocating an arena of {self.nbytes} bytes")
        self._memory: torch.Tensor | None = torch.as_tensor(_DeviceMemory(int(self._own), self.nbytes), device=self.device)
        self._memory.zero_()
        self._fault = torch.zeros(FAULT_WORDS, dtype=torch.int32, pin_memory=True)
        # Nobody may write to a peer before the peer's zeroing is done: the exchange of handles waits for it, being queued behind it.
        self.view = ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*self._open_peers()),
            rank=self.rank,
            world_size=self.world_size,
            timeout_ns=int(timeout_s * 1e9),
            fault=self._fault.data_ptr(),
        )

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        """Offset of ``nbytes`` that nobody else has taken. Every rank takes the same in the same order; ``seal`` sees to it."""
        return self.layout.take(nbytes, align=align)

    def seal(self) -> None:
        """Collective: raise UsageError, on every rank, unless all have taken the same so far. More may be taken afterwards, and sealed."""
        own = self.layout.record()
        check_layouts([LayoutRecord(*record) for record in self._exchange((own.takes, own.taken, own.fingerprint))])

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own memory at ``offset``, as a tensor. Not to be used after ``close()``."""
        if self._memory is None:
            raise UsageError("the arena is closed; create a new one")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not 0 <= offset <= self.nbytes - nbytes:
            raise UsageError(f"{nbytes} bytes at {offset} do not lie in an arena of {self.nbytes}; pass an offset that take() gave")
        return self._memory[offset : offset + nbytes].view(dtype).view(*shape)

    def raise_fault(self) -> None:
        """Raise DeviceTimeout if a kernel's wait ran out of time. Works after the CUDA context was lost to the trap."""
        if message := describe_fault([value & 0xFFFFFFFF for value in self._fault.tolist()], self.view.timeout_ns):
            raise DeviceTimeout(message)

    def close(self) -> None:
        """Give the memory back once the kernels that use it have ended on every rank; the caller sees to that. May be called twice."""
        if self._memory is None:
            return
        self._memory = None
        torch.cuda.synchronize(self.device)
        driver = _cuda.driver()
        for rank, pointer in self._opened.items():
            _checked(driver.cuIpcCloseMemHandle(pointer), f"unmapping the arena of rank {rank}")
        self._opened.clear()
        _checked(driver.cuMemFree(self._own), "freeing the arena")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open_peers(self) -> list[int]:
        """Where every rank's memory is mapped here."""
        driver = _cuda.driver()
        handle = _checked(driver.cuIpcGetMemHandle(self._own), "exporting the arena")
        own = torch.frombuffer(bytearray(handle.reserved), dtype=torch.uint8).to(self.device)
        handles = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(handles, own, group=self.group)
        flags = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        bases = []
        for rank, data in enumerate(handles):
            if rank == self.rank:
                bases.append(int(self._own))
                continue
            peer = driver.CUipcMemHandle()
            peer.reserved = bytes(data.tolist())
            self._opened[rank] = _checked(
                driver.cuIpcOpenMemHandle(peer, flags),
                f"mapping the arena of rank {rank} (do all ranks see each other's GPUs in CUDA_VISIBLE_DEVICES, and does "
                "`nvidia-smi topo -p2p rw` say that they can address each other?)",
            )
            bases.append(int(self._opened[rank]))
        return bases

    def _exchange(self, values: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Every rank's three numbers, on every rank; returns after all ranks have called it."""
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        seen = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(seen, own, group=self.group)
        return [(int(a), int(b), int(c)) for a, b, c in (value.tolist() for value in seen)]


def check_members(sizes: Sequence[int], hosts: Sequence[int]) -> None:
    """Raise UsageError unless all ranks ask for an arena of one size, on one host."""
    if len(set(sizes)) != 1:
        raise UsageError(f"the ranks ask for arenas of different sizes: {list(sizes)} bytes; ask for the same on every rank")
    if len(set(hosts)) != 1:
        elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        raise UsageError(f"ranks {elsewhere} are on another host than rank 0; an arena spans one node: pass a group of one host's ranks")


def describe_fault(words: Sequence[int], timeout_ns: int) -> str:
    """What the words of a fault record say, or an empty string if none was written."""
    found, rank, role, source, block, slot, expected, seen = words
    if not found:
        return ""
    name = ROLES[role] if role < len(ROLES) else f"role {role}"
    return (
        f"rank {rank} ({name}) waited for rank {source} longer than {timeout_ns / 1e9:g} s "
        f"(block {block}, slot {slot}, expected {expected}, seen {seen}); "
        f"see what rank {source} does meanwhile: has it launched the same kernel, with the same grid, on one stream?"
    )


class _DeviceMemory:
    """Raw device memory with the array interface by which torch takes a view of it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}


def _checked(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if status:
        raise DeviceError(f"{what} failed: {_cuda.describe(status)}")
    return values[0] if values else None
