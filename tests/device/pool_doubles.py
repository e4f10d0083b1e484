"""A source of memory on the host, for pools whose ranks are threads."""

import threading
from typing import Any

import torch

from peerlane.device.host.group import Small
from peerlane.device.host.waits import RECORD_WORDS
from peerlane.errors import DeviceError

RANKS = 3


class Meeting:
    """Ranks that are threads, and what they did, in order."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._values: list[Small] = [None] * RANKS
        self.limit = 1 << 40

    def exchange(self, rank: int, value: Small) -> list[Small]:
        self._values[rank] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found


class HostRegion:
    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.bases = [1 << 40] * RANKS

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.memory[offset : offset + nbytes]


class HostMemory:
    """A source of memory on the host, which notes what is asked of it."""

    def __init__(self, meeting: Meeting, rank: int, grows_in_place: bool) -> None:
        self.meeting, self.rank, self.grows_in_place, self.kind = meeting, rank, grows_in_place, "lists"
        self.regions: list[HostRegion] = []
        self.done: list[str] = []

    def exchange(self, value: Small) -> list[Small]:
        self.done.append("meet")
        return self.meeting.exchange(self.rank, value)

    def add(self, nbytes: int) -> HostRegion:
        self.meeting.exchange(self.rank, None)
        if sum(region.nbytes for region in self.regions) + nbytes > self.meeting.limit:
            raise DeviceError("out of memory")
        self.done.append("add")
        if self.grows_in_place and self.regions:
            region = self.regions[0]
            region.memory = torch.cat([region.memory, torch.zeros(nbytes, dtype=torch.uint8)])
            return region
        self.regions.append(HostRegion(nbytes))
        return self.regions[-1]

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def zero(self, region: Any, offset: int, nbytes: int) -> None:
        region.tensor(offset, nbytes).zero_()
        self.done.append("zero")
        self.exchange(None)

    def release(self) -> None:
        self.done.append("release")
        self.regions.clear()

    def fault_record(self) -> torch.Tensor:
        return torch.zeros(RECORD_WORDS, dtype=torch.int32)
