"""Ranks of one process: each has a stream, on a GPU of its own or on its part of one. For checks of kernels, not for solutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from peerlane.device.host.cuda_group import CudaGroup, enable_peer_access, pinned_fault
from peerlane.device.host.group import Small, entered
from peerlane.device.host.layout import LINE_BYTES, Layout
from peerlane.errors import UsageError


@dataclass
class _Shared:
    """What the ranks of one process know in common: their streams, and every allocation so far."""

    streams: list[torch.cuda.Stream]
    gpus: int
    allocations: list[list[torch.Tensor]] = field(default_factory=list)


class LocalRank(CudaGroup):
    """One rank of a process that holds them all. The n-th allocation of every rank is one allocation of the group."""

    def __init__(self, rank: int, world_size: int, shared: _Shared) -> None:
        super().__init__(rank, world_size, torch.device("cuda", rank % shared.gpus))
        self.shared = shared
        self.ranks_per_device = world_size // shared.gpus
        self.sm_count = torch.cuda.get_device_properties(self.device).multi_processor_count // self.ranks_per_device
        self._allocated = 0
        self.memories: list[LocalMemory] = []

    def exchange(self, value: Small) -> list[Small]:
        """Its own value for all: the ranks run the same code one after the other, so they say the same."""
        return [value] * self.world_size

    def allocate(self, nbytes: int) -> LocalMemory:
        number, self._allocated = self._allocated, self._allocated + 1
        if number == len(self.shared.allocations):
            devices = [torch.device("cuda", rank % self.shared.gpus) for rank in range(self.world_size)]
            self.shared.allocations.append([torch.zeros(nbytes + LINE_BYTES, dtype=torch.uint8, device=device) for device in devices])
            for gpu in range(self.shared.gpus):
                torch.cuda.synchronize(gpu)
        self.memories.append(LocalMemory(self.shared.allocations[number], self.rank))
        return self.memories[-1]


class LocalMemory:
    """One tensor for each rank."""

    def __init__(self, tensors: list[torch.Tensor], rank: int) -> None:
        self._own: torch.Tensor | None = tensors[rank]
        self.layout = Layout(tensors[rank].nbytes, reserved=LINE_BYTES)
        self._fault = pinned_fault()
        self.fault = self._fault.data_ptr()
        self.bases = [tensor.data_ptr() for tensor in tensors]

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        if self._own is None:
            raise UsageError("the arena is closed; create a new one")
        return self._own[offset : offset + nbytes]

    def fault_words(self) -> list[int]:
        return self._fault.tolist()

    def close(self) -> None:
        self._own = None


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

    def synchronize(self) -> None:
        """Wait for the work of all ranks."""
        for stream in self.groups[0].shared.streams:
            stream.synchronize()
