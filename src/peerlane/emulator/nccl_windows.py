"""NCCL's device API on emulated ranks: windows and the device communicator, filled as NCCL fills them.

All device code of that API is in NCCL's headers, so nvcc has compiled it into the candidate's kernels. It asks for two plain structures:
ncclWindow_vidmem and ncclDevComm. Their layout is that of the installed headers. A rank's windows lie one behind the other, and those of
the next rank 4 GiB behind. Barriers are the words and the orders that NCCL's code has, so nothing here knows what a barrier is.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from peerlane.device.host.jit import Cubin
from peerlane.device.host.launch import argument, three
from peerlane.device.nccl.program import layout
from peerlane.device.nccl.world import BARRIERS, PAGE_BYTES, Window, World, window_bytes
from peerlane.emulator.emulated_rank import EmulatedRank, PtxLaunch
from peerlane.emulator.host_memory import Part
from peerlane.emulator.ptx_front_end import Ptx
from peerlane.errors import UsageError

_STRIDE_BYTES = 1 << 32
"""What NCCL counts the distance of ranks in."""
_BARRIER_WORDS = 3
"""Words of a barrier beside one for each rank: two epochs, and the counter of multicast, which is not used."""


class EmulatedWorld(World):
    """Stands for the communicator of a group of emulated ranks. Making one is collective."""

    def __init__(self, group: EmulatedRank) -> None:
        self._group, self.rank, self.world_size, self.device = group, group.rank, group.world_size, group.device
        self.sm_count, self.max_threads = group.sm_count, group.max_threads
        space = group.team.world.space
        self._base = self._meet("NCCL's communicator", lambda _: space.reserve(self.world_size * _STRIDE_BYTES))
        self._end, self.closed = 0, False
        self._parts: list[Part] = []
        window = self._window("NCCL's barriers", 4 * BARRIERS * (_BARRIER_WORDS + self.world_size), self._base)
        places = layout()
        made = bytearray(places.sizes["ncclDevComm"])
        for kind in ("", "lsa"):
            ranks = "nRanks" if not kind else "lsaSize"
            places.fill(made, {f"ncclDevComm.{ranks}": self.world_size, f"ncclDevComm.{ranks}_rcp32": (1 << 32) // self.world_size})
            places.fill(made, {"ncclDevComm.lsaRank" if kind else "ncclDevComm.rank": self.rank})
        places.fill(made, {"ncclDevComm.resourceWindow": window.handle}, 8)
        inlined = places.offsets["ncclDevComm.resourceWindow_inlined"]
        made[inlined : inlined + places.sizes["ncclWindow_vidmem"]] = self._structure(self._base)
        places.fill(made, {"ncclLsaBarrierHandle.nBarriers": BARRIERS}, base=places.offsets["ncclDevComm.lsaBarrier"])
        self.comm = (ctypes.c_char * len(made)).from_buffer_copy(made)

    def window(self, *shape: int, dtype: torch.dtype = torch.float32) -> Window:
        nbytes = math.prod(shape) * dtype.itemsize
        made = self._window(f"window {shape} of {str(dtype).removeprefix('torch.')}", nbytes, self._base + self._end)
        made.tensor = made.tensor[:nbytes].view(dtype).view(shape)
        return made

    def kernel(self, program: Cubin, name: str) -> "EmulatedKernel":
        return EmulatedKernel(self._group, program, name)

    def close(self) -> None:
        self._meet("the end of NCCL's communicator")
        self.closed = True
        for part in self._parts:
            part.closed = True

    def _meet(self, what: str, act: Any = lambda values: values) -> Any:
        return self._group.team.meeting.meet(self._group.member, what, None, act)

    def _window(self, name: str, nbytes: int, first: int) -> Window:
        """Returns a window behind the others, whose memory on rank 0 begins at ``first``."""
        room = window_bytes(nbytes)
        self._end += room + PAGE_BYTES  # a page that nobody may touch lies between windows
        if self._end > _STRIDE_BYTES:
            raise UsageError(f"{name} does not fit: the windows of an emulated rank have at most {_STRIDE_BYTES} bytes; take less")
        part = self._part(name, torch.zeros(nbytes, dtype=torch.uint8), first + self.rank * _STRIDE_BYTES, symmetric=True)
        content = torch.frombuffer(self._structure(first), dtype=torch.uint8)
        structure = self._part(f"the ncclWindow_t of {name}", content, self._group.team.world.space.reserve(content.nbytes))
        self._meet(name)
        return Window(structure.address, part.memory)

    def _part(self, name: str, memory: torch.Tensor, address: int, *, symmetric: bool = False) -> Part:
        part = Part(name, self._group.member, address, memory, symmetric=symmetric)
        part.show()
        part.read_by_caller = False
        self._parts.append(part)
        if memory.nbytes:
            self._group.team.world.space.place(part)
            self._group.team.parts.append(part)
        return part

    def _structure(self, first: int) -> bytearray:
        places = layout()
        made = bytearray(places.sizes["ncclWindow_vidmem"])
        places.fill(made, {"ncclWindow_vidmem.lsaFlatBase": first}, 8)
        ranks = {"ncclWindow_vidmem.lsaRank": self.rank, "ncclWindow_vidmem.worldRank": self.rank}
        places.fill(made, {**ranks, "ncclWindow_vidmem.stride4G": 1})
        return made


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel that nvcc has compiled, on an emulated rank."""

    group: EmulatedRank
    program: Cubin
    name: str

    @cached_property
    def _ptx(self) -> Ptx:
        return Ptx(self.program.ptx(), self.program.path)

    def launch(self, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any], *, shared_bytes: int = 0) -> None:
        """Launches on every rank of the group: waits until all have come here."""
        values = [
            ctypes.c_uint64(self.group.address(value)) if isinstance(value, torch.Tensor) else argument(i, value)
            for i, value in enumerate(args)
        ]
        self.group.launch_ptx(PtxLaunch(self._ptx, self.name, three(grid), three(block), values, shared_bytes))
