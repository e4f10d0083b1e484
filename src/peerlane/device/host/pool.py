"""A group's one pool of memory that all its ranks can address, of which every arena leases a part.

All ranks lease and close in the same order, so a part lies at the same place on every rank; the exchange of each lease sees to it. Bytes
that a lease gets are zero, for flags and epochs begin there:

* Memory that nobody had before was zeroed by its owner before any other rank got to know where it lies.
* A part that was given back may still be written by kernels that are behind on some rank. So every rank waits for its device and comes to
  the exchange: from then on no kernel of the last lease runs anywhere. Then every rank zeroes its own part and comes to a second meeting:
  no kernel of the new lease, on whatever rank, can start before all parts are zero.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import torch

from peerlane.device.host.group import Small
from peerlane.device.host.layout import LINE_BYTES, Layout
from peerlane.device.host.memory_report import MemoryReport
from peerlane.device.host.waits import record_in
from peerlane.errors import DeviceError, UsageError

LEASE_BYTES = 64 << 10
"""Leases begin at, and are as long as, multiples of this: no part of an arena asks for a larger alignment."""
FIRST_BYTES = 8 << 20
"""The first bytes of a pool; a few kernels find room there."""


class FreeList:
    """The free parts of ``nbytes``, which may grow at the end: first fit, and free neighbours become one.

    Ranks that take and give back in one order find the same offsets."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.touched = 0
        """Bytes below this offset have been taken before, and may be anything but zero."""
        self._parts: list[tuple[int, int]] = []
        """offset and length of what is free, by offset; no two of them touch"""

    @property
    def free(self) -> int:
        """Bytes that are free, in all parts together."""
        return sum(length for _, length in self._parts)

    @property
    def tail(self) -> int:
        """Bytes that are free at the end: those that are added now join them."""
        return self._parts[-1][1] if self._parts and sum(self._parts[-1]) == self.nbytes else 0

    def grow(self, nbytes: int) -> None:
        """Add free bytes at the end."""
        self.nbytes += nbytes
        self.give(self.nbytes - nbytes, nbytes)

    def fit(self, nbytes: int) -> int | None:
        """The first offset at which as many bytes are free; None if there is none."""
        return next((offset for offset, length in self._parts if length >= nbytes), None)

    def take(self, offset: int, nbytes: int) -> None:
        """Take bytes at an offset that ``fit`` gave."""
        at = bisect_left(self._parts, (offset, 0))
        _, length = self._parts[at]
        self._parts[at : at + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        self.touched = max(self.touched, offset + nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Make bytes free that were taken."""
        at = bisect_left(self._parts, (offset, 0))
        begin, end = offset, offset + nbytes
        first, last = at, at
        if at > 0 and sum(self._parts[at - 1]) == begin:
            first, begin = at - 1, self._parts[at - 1][0]
        if at < len(self._parts) and self._parts[at][0] == end:
            last, end = at + 1, sum(self._parts[at])
        self._parts[first:last] = [(begin, end - begin)]


class Region(Protocol):
    """A range of addresses on every rank, with memory behind it that all ranks can address."""

    @property
    def nbytes(self) -> int:
        """More than before, once the region has grown."""
        ...

    @property
    def bases(self) -> Sequence[int]:
        """Where every rank's memory begins, as kernels of this rank address it."""
        ...

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """This rank's own bytes at ``offset``."""
        ...


class Source(Protocol):
    """Where a pool's memory comes from."""

    @property
    def kind(self) -> str:
        """How ranks reach each other's, for reports."""
        ...

    @property
    def grows_in_place(self) -> bool:
        """Whether memory that is added lies behind that of the last region."""
        ...

    def exchange(self, value: Small) -> list[Small]:
        """Collective: every rank's value, by rank."""
        ...

    def add(self, nbytes: int) -> Region:
        """Collective: a new region of zeroes, or one of earlier that has grown by as much. Raises DeviceError on all ranks or on none."""
        ...

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        ...

    def zero(self, region: Region, offset: int, nbytes: int) -> None:
        """Collective: the bytes are zero on every rank when this returns. No kernel of any rank uses them."""
        ...

    def release(self) -> None:
        """Give all memory back. Not collective; this rank's device is done with it."""
        ...

    def fault_record(self) -> torch.Tensor:
        """A new fault record, which kernels can write and the host can read."""
        ...


class MemoryPool:
    """The leases of one group, on one of its ranks."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._regions: list[tuple[Region, FreeList]] = []
        self.leases: list[Lease] = []
        """those that are not closed, in the order in which they were made"""
        self.allocations = 0
        """how often memory was asked for so far"""

    def report(self) -> MemoryReport:
        """What the leases take at present."""
        leases = [(lease.name, lease.length) for lease in self.leases]
        return MemoryReport.of(self._source.kind, leases, self.reserved_bytes, self.allocations)

    @property
    def reserved_bytes(self) -> int:
        return sum(parts.nbytes for _, parts in self._regions)

    def lease(self, nbytes: int, name: str = "") -> "Lease":
        """Collective: ``nbytes`` of zeroes and a fault record, for the kernel ``name``."""
        length = -(-(nbytes + LINE_BYTES) // LEASE_BYTES) * LEASE_BYTES
        place = self._fit(length)
        if place is None or place[1] < self._regions[place[0]][1].touched:
            self._source.synchronize()  # before the exchange: see above
        check_requests(self._source.exchange([nbytes, *(place or (-1, self.reserved_bytes))]))
        while place is None:
            self._grow(length)
            place = self._fit(length)
        number, offset = place
        region, parts = self._regions[number]
        used_bytes = min(parts.touched - offset, length)
        parts.take(offset, length)
        if used_bytes > 0:
            self._source.zero(region, offset, used_bytes)
        self.leases.append(Lease(self, region, parts, (offset, length), self._source.fault_record(), name))
        return self.leases[-1]

    def give_back(self, lease: "Lease") -> None:
        """The lease is closed. With the last one all memory goes back to where it came from."""
        self.leases.remove(lease)
        lease.parts.give(lease.offset, lease.length)
        if not self.leases:
            self._source.synchronize()
            self._regions.clear()
            self._source.release()

    def _fit(self, length: int) -> tuple[int, int] | None:
        """Number of the region and offset."""
        for number, (_, parts) in enumerate(self._regions):
            offset = parts.fit(length)
            if offset is not None:
                return number, offset
        return None

    def _grow(self, length: int) -> None:
        """Make room. By half of all memory at least, so that allocations are few however many leases there are, if there is as much."""
        needed = length - (self._regions[-1][1].tail if self._regions and self._source.grows_in_place else 0)
        generous = max(needed, self.reserved_bytes // 2, FIRST_BYTES)
        try:
            region = self._source.add(generous)
        except DeviceError:
            if generous == needed:
                raise
            region = self._source.add(needed)
        self.allocations += 1
        known = next((parts for known, parts in self._regions if known is region), None)
        if known is None:
            known = FreeList()
            self._regions.append((region, known))
        known.grow(region.nbytes - known.nbytes)


class Lease:
    """A part of a pool: the memory of one arena (``group.Memory``)."""

    def __init__(self, pool: MemoryPool, region: Region, parts: FreeList, span: tuple[int, int], fault: torch.Tensor, name: str) -> None:
        self.name, self.parts, (self.offset, self.length) = name, parts, span
        self.layout = Layout(self.length, reserved=LINE_BYTES)
        self.bases = [base + self.offset for base in region.bases]
        self.fault, self.record = fault.data_ptr(), record_in(fault)
        self._pool, self._region, self._fault = pool, region, fault

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._region.tensor(self.offset + offset, nbytes)

    def close(self) -> None:
        self._pool.give_back(self)


def check_requests(requests: Sequence[Sequence[int]]) -> None:
    """Raise UsageError unless all ranks ask for arenas of one size, which lie at the same place: [nbytes, region, offset] of each."""
    check_sizes([nbytes for nbytes, _, _ in requests])
    places = [tuple(place) for _, *place in requests]
    if len(set(places)) != 1:
        told = ", ".join(f"rank {rank}: region {region}, offset {offset}" for rank, (region, offset) in enumerate(places))
        raise UsageError(
            f"the ranks find room for the same arena at different places ({told}); create and close the same arenas in the same order on "
            "every rank"
        )


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise UsageError unless all ranks ask for an arena of one size."""
    if len(set(sizes)) != 1:
        raise UsageError(f"the ranks ask for arenas of different sizes: {list(sizes)} bytes; ask for the same on every rank")
