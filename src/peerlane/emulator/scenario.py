"""Scenarios for the emulator: the memory of some ranks, and the launches of each."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peerlane.device.host.arena import ArenaView, RemoteView
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.host.layout import LINE_BYTES, Layout
from peerlane.device.host.waits import WaitRecord
from peerlane.emulator.job import BASE, PAGE_BYTES, TIMEOUT_NS, VARIABLES, Job, Launch, Region, whole_pages
from peerlane.emulator.ptx_front_end import Ptx
from peerlane.errors import UsageError


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
    multicast: list[list[int]] | None = None
    """The memory that multicast addresses stand for: a list of addresses for each rank."""


GUARDED_TAKES = 256
"""Parts that an emulated arena can be cut into: it is longer than it says, because guard pages lie around each part."""


class EmulatedArena:
    """A stand-in for :class:`peerlane.device.Arena` without a GPU: zeroed memory that all ranks can address, given out by counting."""

    def __init__(self, memory: Buffer, faults: Buffer, node_size: int) -> None:
        self.memory = memory
        self.faults = faults
        self.node_size = node_size
        self.nbytes = memory.nbytes
        self.world_size = len(memory.addresses)
        self.layout = Layout(memory.nbytes - GUARDED_TAKES * 2 * PAGE_BYTES, reserved=LINE_BYTES, guard_bytes=PAGE_BYTES)

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        """Returns the offset of ``nbytes`` that nobody else has taken. Guard pages lie around each part."""
        offset = self.layout.take(nbytes, align=align)
        if offset + nbytes > self.nbytes:
            raise UsageError(f"an emulated arena has more than {GUARDED_TAKES} parts; take fewer and larger ones")
        return offset

    def view(self, rank: int) -> ArenaView:
        """Returns the arena as rank ``rank`` passes it to kernels."""
        node = rank // self.node_size
        bases = (address if q // self.node_size == node else 0 for q, address in enumerate(self.memory.addresses))
        return ArenaView(
            base=(ctypes.c_uint64 * MAX_RANKS)(*bases),
            rank=rank,
            world_size=self.world_size,
            stop=self.faults.addresses[rank] + WaitRecord.stop.offset,
            fault=self.faults.addresses[rank],
        )


class RemoteMemory:
    """Zeroed memory of the same size on every rank that no other rank can address: kernels reach it by messages (``Remote``)."""

    def __init__(self, memory: Buffer) -> None:
        self.memory = memory
        self.layout = Layout(memory.nbytes)

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        """Returns the offset of ``nbytes`` that nobody else has taken, the same on every rank."""
        return self.layout.take(nbytes, align=align)

    def view(self, rank: int) -> RemoteView:
        """Returns the memory as rank ``rank`` passes it to kernels."""
        addresses = self.memory.addresses
        return RemoteView(addresses[rank], addresses[-1] - addresses[-2] if len(addresses) > 1 else 0, rank, len(addresses))


Argument = Any
"""A ctypes value, a Buffer (its address on each rank), an EmulatedArena or a RemoteMemory (its view), or a function from the rank to one of
these."""


@dataclass
class Scenario:
    """A list of launches on ``world_size`` ranks, to be run under many schedules.

    ``source`` and ``defines`` are what ``compile_cubin`` would get; or ``source`` is PTX that a compiler made. Ranks start together and are
    not synchronised by anything but their kernels. They lie in ``nodes`` nodes, neighbours together: an arena's view has null pointers for
    ranks of other nodes, which only a :class:`RemoteMemory` reaches. Launches of a rank run one after the other, as on one stream; those of
    different ``stream`` numbers run side by side.
    """

    name: str
    source: str | Path | Ptx
    world_size: int
    defines: Mapping[str, str | int] = field(default_factory=dict)
    include_dirs: Sequence[Path] = ()
    nodes: int = 1
    resident_blocks: int | None = None
    """how many blocks of a rank can run at a time; more are started as others end. None: as many as the GPU holds, see ``check``"""
    buffers: list[Buffer] = field(default_factory=list, init=False)
    arenas: list[EmulatedArena] = field(default_factory=list, init=False)
    launches: list[Launch] = field(default_factory=list, init=False)
    _end: int = field(default=PAGE_BYTES, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"scenario {self.name!r} has {self.world_size} ranks; expected 1 to {MAX_RANKS}")
        if self.nodes < 1 or self.world_size % self.nodes:
            raise UsageError(f"scenario {self.name!r} has {self.world_size} ranks in {self.nodes} nodes; expected as many ranks in each")

    def arena(self, nbytes: int) -> EmulatedArena:
        """Adds a symmetric arena of ``nbytes`` on every rank."""
        name, size = f"arena {len(self.arenas)}" if self.arenas else "arena", nbytes + LINE_BYTES + GUARDED_TAKES * 2 * PAGE_BYTES
        arena = EmulatedArena(
            self._place(name, size, torch.uint8, symmetric=True),
            self._place("wait record", ctypes.sizeof(WaitRecord), torch.int32, symmetric=False),
            self.world_size // self.nodes,
        )
        arena.faults.initial = [bytes(WaitRecord(limit_ns=TIMEOUT_NS, traps=1))] * self.world_size
        self.arenas.append(arena)
        return arena

    def multicast(self, arena: EmulatedArena) -> Buffer:
        """Adds multicast addresses of an arena, one on each rank: they stand for the arena's memory on all ranks of its node.

        Offsets are those of ``arena.take``. Only ``multimem`` instructions may use them, so the source must be PTX.
        """
        addresses, size = arena.memory.addresses, arena.node_size
        made = self._place(f"multicast address of {arena.memory.name}", arena.memory.nbytes, torch.uint8, symmetric=False)
        made.multicast = [addresses[rank // size * size : (rank // size + 1) * size] for rank in range(self.world_size)]
        return made

    def remote(self, nbytes: int) -> RemoteMemory:
        """Adds memory of the second tier of ``nbytes`` on every rank."""
        return RemoteMemory(self._place("remote memory", nbytes, torch.uint8, symmetric=False))

    def buffer(self, name: str, contents: Sequence[torch.Tensor], expected: Sequence[torch.Tensor] | None = None) -> Buffer:
        """Adds ordinary memory of each rank: at first ``contents[rank]``; in the end, if given, ``expected[rank]`` bit for bit."""
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
        dependent: bool = False,
    ) -> None:
        """Adds one launch on every rank. ``grid`` may be a function of the rank, to see what happens when ranks disagree. ``cluster`` is
        what the kernel's __cluster_dims__ says, which the emulator does not see: so many blocks in a row run at the same time.
        ``dependent``: the launch may begin before the one before it has ended, and waits by griddepcontrol.wait."""
        for rank in range(self.world_size):
            sizes = (_three(grid(rank) if callable(grid) else grid), _three(block))
            if cluster < 1 or _product(sizes[0]) % cluster:
                raise UsageError(
                    f"scenario {self.name!r} launches {_product(sizes[0])} blocks in clusters of {cluster}; expected a multiple of that"
                )
            arguments = tuple(self._argument(i, value, rank) for i, value in enumerate(args))
            self.launches.append(Launch(kernel, rank, stream, *sizes, shared_bytes, cluster, arguments, dependent=dependent))

    def job(self, variables: bytes = b"") -> Job:
        """Returns the scenario as the emulator runs it: every part of an arena is a region of its own. ``variables`` are a rank's device
        variables as they are at first."""
        regions: list[Region] = []
        for buffer in self.buffers:
            arena = next((arena for arena in self.arenas if arena.memory is buffer), None)
            taken = [] if arena is None else arena.layout.parts[1:]
            parts = [(f"{buffer.name} allocation {i}", start, nbytes) for i, (start, nbytes) in enumerate(taken)]
            if parts:
                parts.insert(0, (f"{buffer.name} first line", 0, LINE_BYTES))
            regions += [
                _region(buffer, rank, *part) for rank in range(self.world_size) for part in parts or [(buffer.name, 0, buffer.nbytes)]
            ]
        faults = [next(region for region in regions if region.address == address) for address in self._fault_addresses()]
        kept = [
            Region(VARIABLES, rank, BASE + self._end + rank * whole_pages(len(variables)), len(variables), False, contents=[(0, variables)])
            for rank in range(self.world_size if variables else 0)
        ]
        return Job(self.name, self.world_size, [*regions, *kept], self.launches, faults, kept)

    def _fault_addresses(self) -> list[int]:
        return self.arenas[0].faults.addresses if self.arenas else []

    def _place(self, name: str, nbytes: int, dtype: torch.dtype, *, symmetric: bool) -> Buffer:
        addresses = []
        for _ in range(self.world_size):
            addresses.append(BASE + self._end)
            # A guard page between any two buffers.
            self._end += whole_pages(nbytes)
        buffer = Buffer(name, addresses, nbytes, dtype, symmetric)
        self.buffers.append(buffer)
        return buffer

    def _argument(self, index: int, value: Argument, rank: int) -> bytes:
        if callable(value):
            value = value(rank)
        if isinstance(value, Buffer):
            value = ctypes.c_uint64(value.addresses[rank])
        elif isinstance(value, EmulatedArena | RemoteMemory):
            value = value.view(rank)
        if not isinstance(value, ctypes.Structure | ctypes._SimpleCData):
            raise UsageError(
                f"argument {index} of a launch in scenario {self.name!r} is a {type(value).__name__}; "
                "expected a buffer or arena of the scenario, or a ctypes value, which says its width"
            )
        return bytes(value)


def _region(buffer: Buffer, rank: int, name: str, start: int, nbytes: int) -> Region:
    """Returns a part of a buffer."""
    initial = None if buffer.initial is None else buffer.initial[rank][start : start + nbytes]
    expected = None if buffer.expected is None else buffer.expected[rank][start : start + nbytes]
    contents = [(0, initial)] if initial else []
    multicast = () if buffer.multicast is None else buffer.multicast[rank]
    return Region(name, rank, buffer.addresses[rank] + start, nbytes, buffer.symmetric, buffer.dtype, contents, expected, multicast)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _three(size: int | Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def _product(size: tuple[int, int, int]) -> int:
    return size[0] * size[1] * size[2]
