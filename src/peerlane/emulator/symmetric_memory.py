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
from peerlane.emulator.ptx_front_end import Ptx
from peerlane.errors import UsageError
from peerlane.settings import multicast_allowed

SIGNAL_PAD_BYTES = 2048
_BARRIER, _WRITE = "symmetric_memory_barrier", "symmetric_memory_write"
# As torch's kernel: thread t signals rank t by changing 0 to 1 in its pad, and takes rank t's signal by changing 1 to 0 in its own.
# A write of no count comes behind a fence, as cuStreamWriteValue32 promises; with a count it is a memset.
_SOURCE = Ptx(
    f"""
.version 8.0
.target sm_90
.address_size 64
.file 1 "symmetric memory's barrier"
.visible .entry {_BARRIER}(
    .param .u64 pads, .param .u32 first, .param .u32 rank, .param .u32 ranks, .param .u32 target, .param .u32 source)
{{
    .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    .loc 1 1 0
    ld.param.b64 %rd1, [pads];
    ld.param.b32 %r1, [first];
    ld.param.b32 %r2, [rank];
    ld.param.b32 %r3, [ranks];
    mov.u32 %r4, %tid.x;
    setp.ge.u32 %p1, %r4, %r3;
    @%p1 bra DONE;
    setp.eq.u32 %p1, %r4, %r2;
    @%p1 bra DONE;
    ld.param.b32 %r5, [target];
    setp.ne.u32 %p1, %r5, %r4;
    setp.ne.and.u32 %p1, %r5, -1, %p1;
    @%p1 bra PUT_DONE;
    mul.wide.u32 %rd2, %r4, 8;
    add.s64 %rd2, %rd1, %rd2;
    ld.global.b64 %rd3, [%rd2];
    add.s32 %r6, %r1, %r2;
    mul.wide.u32 %rd4, %r6, 4;
    add.s64 %rd3, %rd3, %rd4;
PUT:
    atom.release.sys.global.cas.b32 %r7, [%rd3], 0, 1;
    setp.ne.u32 %p1, %r7, 0;
    @%p1 bra PUT;
PUT_DONE:
    ld.param.b32 %r5, [source];
    setp.ne.u32 %p1, %r5, %r4;
    setp.ne.and.u32 %p1, %r5, -1, %p1;
    @%p1 bra DONE;
    mul.wide.u32 %rd5, %r2, 8;
    add.s64 %rd5, %rd1, %rd5;
    ld.global.b64 %rd6, [%rd5];
    add.s32 %r6, %r1, %r4;
    mul.wide.u32 %rd7, %r6, 4;
    add.s64 %rd6, %rd6, %rd7;
WAIT:
    atom.acquire.sys.global.cas.b32 %r8, [%rd6], 1, 0;
    setp.ne.u32 %p1, %r8, 1;
    @%p1 bra WAIT;
DONE:
    ret;
}}
.visible .entry {_WRITE}(.param .u64 at, .param .u32 value, .param .u32 count)
{{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<2>;
    .loc 1 2 0
    ld.param.b64 %rd1, [at];
    ld.param.b32 %r1, [value];
    ld.param.b32 %r2, [count];
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra NEXT;
    fence.acq_rel.sys;
    st.relaxed.sys.global.b32 [%rd1], %r1;
    ret;
NEXT:
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra WRITTEN;
    st.global.b32 [%rd1], %r1;
    add.s64 %rd1, %rd1, 4;
    sub.s32 %r2, %r2, 1;
    bra NEXT;
WRITTEN:
    ret;
}}
"""
)
_ALL, _NONE = 0xFFFFFFFF, 0xFFFFFFFE


def empty(group: EmulatedRank, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of zeros that a later rendezvous makes known to the other ranks."""
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    dtype = dtype or torch.get_default_dtype()
    part = _part(group, f"symmetric memory {shape} of {str(dtype).removeprefix('torch.')}", math.prod(shape) * dtype.itemsize)
    part.fresh, part.mapped[group.member] = part.memory, part
    return part.memory.view(dtype).view(shape)


def _part(group: EmulatedRank, name: str, nbytes: int) -> Part:
    space = group.team.world.space
    memory = torch.zeros(max(nbytes, 1), dtype=torch.uint8)
    part = Part(name, group.member, space.address_of_new(memory), memory[:nbytes], symmetric=True)
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
            part.mapped[group.member] = own
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
        self._signal(channel, _ALL, _ALL)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Launches a kernel that signals one rank."""
        self._signal(channel, dst_rank, _NONE)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Launches a kernel that waits for one rank's signal."""
        self._signal(channel, _NONE, src_rank)

    def stream_write_value32(self, addr: int, val: int) -> None:
        """Writes a word behind a fence, in the order of the stream."""
        _write(self._group, addr, val)

    def _signal(self, channel: int, target: int, source: int) -> None:
        numbers = (channel * self.world_size, self.rank, self.world_size, target, source)
        values = [ctypes.c_uint64(self.signal_pad_ptrs_dev), *map(ctypes.c_uint32, numbers)]
        self._group.launch_ptx(PtxLaunch(_SOURCE, _BARRIER, (1,), (32,), values))


def write_value32(group: EmulatedRank, tensor: torch.Tensor, offset: int, value: int, count: int = 0) -> torch.Tensor:
    """Writes a word at the tensor's element ``offset`` behind a fence, or ``count`` words without; returns the tensor."""
    if tensor.itemsize != 4 or offset < 0 or offset + max(count, 1) > tensor.numel():
        what = f"a write of {max(count, 1)} words at element {offset} of {tuple(tensor.shape)} of {tensor.dtype}"
        raise UsageError(f"{what}; expected elements of 4 bytes, and a place inside of the tensor")
    _write(group, group.address(tensor) + 4 * offset, value, count)
    return tensor


def _write(group: EmulatedRank, address: int, value: int, count: int = 0) -> None:
    values = [ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint32(count)]
    group.launch_ptx(PtxLaunch(_SOURCE, _WRITE, (1,), (1,), values))


def _view(part: Part, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
    begin = storage_offset * dtype.itemsize
    end = begin + math.prod(sizes) * dtype.itemsize
    if end > part.nbytes:
        raise UsageError(f"a view of {tuple(sizes)} of {dtype} ends {end - part.nbytes} bytes behind {part.name}; take less")
    return part.memory[begin:end].view(dtype).view(tuple(sizes))
