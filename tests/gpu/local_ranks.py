"""Ranks of one process: each has a stream, on a GPU of its own or on its part of one. For checks of kernels, not for solutions."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from peerlane.device.host.cuda_group import CudaGroup, enable_peer_access
from peerlane.device.host.device_memory import pinned_fault
from peerlane.device.host.group import Small, entered
from peerlane.device.host.pool import Region
from peerlane.device.host.waits import Waits


@dataclass
class _Shared:
    """What the ranks of one process know in common: their streams, and the memory of all of them."""

    streams: list[torch.cuda.Stream]
    gpus: int
    regions: list[list[torch.Tensor]] = field(default_factory=list)
    """for every allocation so far, a tensor of each rank"""
    steps: int = 0
    """of the pools that have been done for all ranks"""

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus)

    def synchronize(self) -> None:
        for gpu in range(self.gpus):
            torch.cuda.synchronize(gpu)


class LocalRank(CudaGroup):
    """One rank of a process that holds them all."""

    def __init__(self, rank: int, world_size: int, shared: _Shared) -> None:
        super().__init__(rank, world_size, shared.device(rank), LocalMemory(rank, world_size, shared))
        self.shared = shared
        self.waits = Waits(10.0, traps=True)  # for checks: nobody waits ten minutes for one, and a trap is seen at once
        self.ranks_per_device = world_size // shared.gpus
        self.sm_count = torch.cuda.get_device_properties(self.device).multi_processor_count // self.ranks_per_device

    def exchange(self, value: Small) -> list[Small]:
        """Its own value for all: the ranks run the same code one after the other, so they say the same."""
        return [value] * self.world_size


class LocalMemory:
    """The memory of the pool, as one rank sees it. The ranks take the same steps one after the other, and the first one takes each for all:
    later ones would wait for its kernels, which wait for theirs."""

    kind, grows_in_place = "one process", False

    def __init__(self, rank: int, world_size: int, shared: _Shared) -> None:
        self._rank, self._world_size, self._shared = rank, world_size, shared
        self._steps, self._added = 0, 0

    def exchange(self, value: Small) -> list[Small]:
        return [value] * self._world_size

    def add(self, nbytes: int) -> "LocalRegion":
        if self._first():
            devices = map(self._shared.device, range(self._world_size))
            self._shared.regions.append([torch.zeros(nbytes, dtype=torch.uint8, device=device) for device in devices])
            self._shared.synchronize()
        number, self._added = self._added, self._added + 1
        return LocalRegion(self._shared.regions[number], self._rank)

    def synchronize(self) -> None:
        if self._first():
            self._shared.synchronize()

    def zero(self, region: Region, offset: int, nbytes: int) -> None:
        assert isinstance(region, LocalRegion)
        if self._first():
            for tensor in region.tensors:
                tensor[offset : offset + nbytes].zero_()
            self._shared.synchronize()

    def release(self) -> None:
        """The memory stays: other ranks have not come to this step yet."""

    def fault_record(self) -> torch.Tensor:
        return pinned_fault()

    def _first(self) -> bool:
        self._steps += 1
        if self._steps <= self._shared.steps:
            return False
        self._shared.steps = self._steps
        return True


@dataclass(frozen=True)
class LocalRegion:
    """One tensor for each rank."""

    tensors: list[torch.Tensor]
    rank: int

    @property
    def nbytes(self) -> int:
        return self.tensors[0].nbytes

    @property
    def bases(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.tensors[self.rank][offset : offset + nbytes]


class LocalRanks:
    """``world_size`` ranks of this process; where there are fewer GPUs, all share GPU 0."""

    def __init__(self, world_size: int) -> None:
        self.gpus = world_size if torch.cuda.device_count() >= world_size else 1
        if self.gpus > 1:
            enable_peer_access(world_size)
        streams = [torch.cuda.Stream(torch.device("cuda", rank % self.gpus)) for rank in range(world_size)]  # type: ignore[no-untyped-call, unused-ignore]
        shared = _Shared(streams, self.gpus)
        self.groups = [LocalRank(rank, world_size, shared) for rank in range(world_size)]
        for _ in self.each():
            # Now: the driver loads a kernel at its first use, and waits for all that runs, which would be a rank that waits for others.
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call, unused-ignore]
        self.synchronize()

    def each(self) -> Iterator[LocalRank]:
        """Every rank, with its stream and its group as the current ones."""
        for group in self.groups:
            with torch.cuda.device(group.device), torch.cuda.stream(group.shared.streams[group.rank]), entered(group):
                yield group

    def synchronize_gpus(self) -> None:
        """Wait for all streams of all GPUs."""
        self.groups[0].shared.synchronize()

    def synchronize(self) -> None:
        """Wait for the work of all ranks."""
        for stream in self.groups[0].shared.streams:
            stream.synchronize()
