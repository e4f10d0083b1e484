"""What the emulator is to run: the memory of some ranks, and the launches of each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peerlane.device.arena import FAULT_WORDS, MAX_RANKS, ArenaView
from peerlane.device.layout import LINE_BYTES, Layout
from peerlane.errors import UsageError

BASE = 0x2000_0000_0000
"""Where the ranks' memory begins. Fixed, so that arguments can be made before there is a process to hold it."""
_PAGE_BYTES = 4096
TIMEOUT_NS = 2_000_000_000
_MAX_THREADS = 1 << 15


@dataclass(eq=False)
class Buffer:
    """Memory of the same size and name on every rank; ``addresses[r]`` is where rank r's lies."""

    name: str
    addresses: list[int]
    nbytes: int
    dtype: torch.dtype
    symmetric: bool
    """whether every rank may use every rank's part, or only its own"""
    initial: list[bytes] | None = None
    expected: list[bytes] | None = None


class EmulatedArena:
    """Stands for :class:`peerlane.device.Arena` where there is no GPU: zeroed memory that all ranks can address, given out by counting."""

    def __init__(self, memory: Buffer, faults: Buffer) -> None:
        self.memory = memory
        self.faults = faults
        self.nbytes = memory.nbytes
        self.world_size = len(memory.addresses)
        self.taken: list[tuple[int, int]] = []
        self._layout = Layout(memory.nbytes, reserved=LINE_BYTES)

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        """Offset of ``nbytes`` that nobody else has taken."""
        offset = self._layout.take(nbytes, align=align)
        self.taken.append((offset, nbytes))
        return offset

    def view(self, rank: int) -> ArenaView:
        """The arena as rank ``rank`` passes it to kernels."""
        bases = (*self.memory.addresses, *(0,) * (MAX_RANKS - self.world_size))
        return ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*bases),
            rank=rank,
            world_size=self.world_size,
            timeout_ns=TIMEOUT_NS,
            fault=self.faults.addresses[rank],
        )


Argument = Any
"""A ctypes value, a Buffer (its address on each rank), an EmulatedArena (its view), or a function from the rank to one of these."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch of one rank."""

    kernel: str
    rank: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: int
    arguments: tuple[bytes, ...]


@dataclass
class Scenario:
    """Some launches on ``world_size`` ranks, to be run under many schedules.

    ``source`` and ``defines`` are what ``compile_cubin`` would get. Ranks start together and are not synchronised by anything but their
    kernels. Launches of a rank run one after the other, as on one stream; those of different ``stream`` numbers run side by side.
    """

    name: str
    source: str | Path
    world_size: int
    defines: Mapping[str, str | int] = field(default_factory=dict)
    include_dirs: Sequence[Path] = ()
    resident_blocks: int = 132
    """how many blocks of a rank can run at a time; more are started as others end"""
    buffers: list[Buffer] = field(default_factory=list, init=False)
    arenas: list[EmulatedArena] = field(default_factory=list, init=False)
    launches: list[Launch] = field(default_factory=list, init=False)
    _end: int = field(default=_PAGE_BYTES, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"scenario {self.name!r} has {self.world_size} ranks; expected 1 to {MAX_RANKS}")

    def arena(self, nbytes: int) -> EmulatedArena:
        """A symmetric arena of ``nbytes`` on every rank."""
        arena = EmulatedArena(
            self._place(f"arena {len(self.arenas)}" if self.arenas else "arena", nbytes + LINE_BYTES, torch.uint8, symmetric=True),
            self._place("fault record", 4 * FAULT_WORDS, torch.int32, symmetric=False),
        )
        self.arenas.append(arena)
        return arena

    def buffer(self, name: str, contents: Sequence[torch.Tensor], expected: Sequence[torch.Tensor] | None = None) -> Buffer:
        """Ordinary memory of each rank, holding ``contents[rank]`` at first and, if given, ``expected[rank]`` bit for bit in the end."""
        for tensors in (contents, *(() if expected is None else (expected,))):
            sizes = {(tensor.nbytes, tensor.dtype) for tensor in tensors}
            if len(tensors) != self.world_size or sizes != {(contents[0].nbytes, contents[0].dtype)}:
                raise UsageError(
                    f"buffer {name!r} of scenario {self.name!r}: got {len(tensors)} tensors of {len(sizes)} sizes or dtypes; "
                    f"expected one tensor for each of the {self.world_size} ranks, all of the same size and dtype"
                )
        buffer = self._place(name, contents[0].nbytes, contents[0].dtype, symmetric=False)
        buffer.initial = [_bytes(tensor) for tensor in contents]
        buffer.expected = None if expected is None else [_bytes(tensor) for tensor in expected]
        return buffer

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int] | Callable[[int], int | Sequence[int]],
        block: int | Sequence[int],
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        stream: int = 0,
        cluster: int = 1,
    ) -> None:
        """Add one launch on every rank. ``grid`` may be a function of the rank, to see what happens when ranks disagree. ``cluster`` is
        what the kernel's __cluster_dims__ says, which the emulator does not see: so many blocks in a row run at the same time."""
        for rank in range(self.world_size):
            sizes = (_three(grid(rank) if callable(grid) else grid), _three(block))
            if cluster < 1 or _product(sizes[0]) % cluster:
                raise UsageError(
                    f"scenario {self.name!r} launches {_product(sizes[0])} blocks in clusters of {cluster}; expected a multiple of that"
                )
            arguments = tuple(self._argument(i, value, rank) for i, value in enumerate(args))
            self.launches.append(Launch(kernel, rank, stream, *sizes, shared_bytes, cluster, arguments))
        threads = sum(_product(launch.grid) * _product(launch.block) for launch in self.launches[-self.world_size :])
        if threads > _MAX_THREADS:
            raise UsageError(
                f"scenario {self.name!r} launches {threads} threads at a time; expected at most {_MAX_THREADS}: "
                "use fewer or smaller blocks, a protocol shows its faults with two of each"
            )

    def describe(self, number: int, offset: int) -> str:
        """A byte of buffer ``number`` (as the job counts them, from 1) in words."""
        buffer, rank = self.place(number)
        arena = next((arena for arena in self.arenas if arena.memory is buffer), None)
        if arena is None:
            return f"{buffer.name}+{offset} of rank {rank}"
        taken = next(((i, start) for i, (start, nbytes) in enumerate(arena.taken) if start <= offset < start + nbytes), None)
        part = "" if taken is None else f" (allocation {taken[0]}+{offset - taken[1]})"
        return f"{buffer.name}+{offset}{part} of rank {rank}"

    def place(self, number: int) -> tuple[Buffer, int]:
        """The buffer and the rank of number ``number``."""
        return self.buffers[(number - 1) // self.world_size], (number - 1) % self.world_size

    def _place(self, name: str, nbytes: int, dtype: torch.dtype, *, symmetric: bool) -> Buffer:
        addresses = []
        for _ in range(self.world_size):
            addresses.append(BASE + self._end)
            # A page that belongs to nobody between any two buffers.
            self._end += (-(-nbytes // _PAGE_BYTES) + 1) * _PAGE_BYTES
        buffer = Buffer(name, addresses, nbytes, dtype, symmetric)
        self.buffers.append(buffer)
        return buffer

    def _argument(self, index: int, value: Argument, rank: int) -> bytes:
        if callable(value):
            value = value(rank)
        if isinstance(value, Buffer):
            value = ctypes.c_uint64(value.addresses[rank])
        elif isinstance(value, EmulatedArena):
            value = value.view(rank)
        if not isinstance(value, ctypes.Structure | ctypes._SimpleCData):
            raise UsageError(
                f"argument {index} of a launch in scenario {self.name!r} is a {type(value).__name__}; "
                "expected a buffer or arena of the scenario, or a ctypes value, which says its width"
            )
        return bytes(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _three(size: int | Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def _product(size: tuple[int, int, int]) -> int:
    return size[0] * size[1] * size[2]
