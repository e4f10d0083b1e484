"""torch's symmetric memory on emulated ranks: what ``symm_mem.empty`` and ``rendezvous`` give, at addresses that all ranks' kernels use.

A handle has the attributes of torch's that kernels are written with. Its barrier is a kernel, as torch's is, so it takes part in the order
that the emulator checks.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from peerlane.emulator.emulated_rank import EmulatedRank, PtxLaunch
from peerlane.emulator.host_memory import MulticastPart, Part
from peerlane.emulator.stream_kernels import ALL, BARRIER, NONE, SIGNALS, WRITE
from peerlane.errors import UsageError
from peerlane.settings import multicast_allowed

SIGNAL_PAD_BYTES = 2048


def empty(group: EmulatedRank, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of zeros that a later rendezvous makes known to the other ranks."""
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    dtype = dtype or torch.get_default_dtype()
    part = _part(group, f"symmetric memory {shape} of {str(dtype).removeprefix('torch.')}", math.prod(shape) * dtype.itemsize)
    part.fresh, part.mapped[group.member] = part.memory, part
    return part.memory.view(dtype).view(shape)


def _part(group: EmulatedRank, name: str, nbytes: int) -> Part:
    space = group.team.world.space
    memory = torch.zeros(max(nbytes, 1), dtype=torch.uint8)[:nbytes]  # in inference mode nothing else holds the whole of it
    part = Part(name, group.member, space.address_of_new(memory), memory, symmetric=True)
    part.show()
    part.read_by_caller = False
    if nbytes:
        space.place(part)
        group.team.parts.append(part)
    return part


class SymmetricMemory:
    """The memory of one tensor on all ranks of a group, as one of them sees it."""

    def __init__(self, group: EmulatedRank, tensor: torch.Tensor) -> None:
        """Is collective."""
        own = group.team.world.space.part_of(tensor)
        if own is None or not own.symmetric:
            raise UsageError("rendezvous got a tensor that is not of symm_mem.empty; expected symmetric memory")
        pad = _part(group, "signal pad", SIGNAL_PAD_BYTES)
        self._group = group
        met = group.team.meeting.meet(group.member, "a rendezvous", (own, pad, tuple(tensor.shape), tensor.dtype))
        if len({(shape, dtype) for _, _, shape, dtype in met}) > 1:
            raise UsageError(f"rendezvous got tensors of {[(shape, dtype) for _, _, shape, dtype in met]}; expected the same on all ranks")
        self._parts, self._pads = [item[0] for item in met], [item[1] for item in met]
        for part in (*self._parts, *self._pads):
            if part not in group.team.parts:
                group.team.parts.append(part)
        for part in self._parts:
            part.mapped |= dict(zip(group.team.members, self._parts, strict=True))
        self._tensor = tensor
        self.rank, self.world_size, self.device = group.rank, group.world_size, torch.device("cuda", group.member)
        self.buffer_size, self.signal_pad_size, self.offset = own.nbytes, SIGNAL_PAD_BYTES, 0
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self.buffer_ptrs = [part.address for part in self._parts]
        self.signal_pad_ptrs = [part.address for part in self._pads]
        self.multicast_ptr = self._multicast() if multicast_allowed() else 0
        self._tables = [torch.tensor(addresses, dtype=torch.int64) for addresses in (self.buffer_ptrs, self.signal_pad_ptrs)]
        self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = (group.address(table) for table in self._tables)

    def _multicast(self) -> int:
        """Returns this rank's multicast address of the memory."""
        address = self._group.team.world.space.reserve(self.buffer_size)
        self._group.team.parts.append(MulticastPart(self._group.member, address, self._parts))
        return int(address)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """Returns rank ``rank``'s memory as a tensor."""
        return _view(self._parts[rank], sizes, dtype, storage_offset)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns rank ``peer``'s memory as a tensor."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype = torch.uint32, storage_offset: int = 0
    ) -> torch.Tensor:
        """Returns rank ``rank``'s signal pad as a tensor."""
        return _view(self._pads[rank], sizes or (SIGNAL_PAD_BYTES // dtype.itemsize,), dtype, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Launches a kernel that waits for all other ranks."""
        self._signal(channel, ALL, ALL)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Launches a kernel that signals one rank."""
        self._signal(channel, dst_rank, NONE)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Launches a kernel that waits for one rank's signal."""
        self._signal(channel, NONE, src_rank)

    def stream_write_value32(self, addr: int, val: int) -> None:
        """Writes a word behind a fence, in the order of the stream."""
        _write(self._group, addr, val)

    def _signal(self, channel: int, target: int, source: int) -> None:
        numbers = (channel * self.world_size, self.rank, self.world_size, target, source)
        values = [ctypes.c_uint64(self.signal_pad_ptrs_dev), *map(ctypes.c_uint32, numbers)]
        self._group.launch_ptx(PtxLaunch(SIGNALS, BARRIER, (1,), (32,), values))


def write_value32(group: EmulatedRank, tensor: torch.Tensor, offset: int, value: int, count: int = 0) -> torch.Tensor:
    """Writes a word at the tensor's element ``offset`` behind a fence, or ``count`` words without; returns the tensor."""
    if tensor.itemsize != 4 or offset < 0 or offset + max(count, 1) > tensor.numel():
        what = f"a write of {max(count, 1)} words at element {offset} of {tuple(tensor.shape)} of {tensor.dtype}"
        raise UsageError(f"{what}; expected elements of 4 bytes, and a place inside of the tensor")
    _write(group, group.address(tensor) + 4 * offset, value, count)
    return tensor


def _write(group: EmulatedRank, address: int, value: int, count: int = 0) -> None:
    values = [ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint32(count)]
    group.launch_ptx(PtxLaunch(SIGNALS, WRITE, (1,), (1,), values))


def _view(part: Part, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
    begin = storage_offset * dtype.itemsize
    end = begin + math.prod(sizes) * dtype.itemsize
    if end > part.nbytes:
        raise UsageError(f"a view of {tuple(sizes)} of {dtype} ends {end - part.nbytes} bytes behind {part.name}; take less")
    return part.memory[begin:end].view(dtype).view(tuple(sizes))
