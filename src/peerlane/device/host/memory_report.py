"""What a group's arenas take on one rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank's own memory. What ranks map of each other's is not counted."""

    kind: str
    """how ranks reach it: virtual memory, CUDA IPC, one process, emulated"""
    reserved_bytes: int
    """taken from the device"""
    leased_bytes: int
    """The bytes in arenas that are not closed."""
    largest_lease_bytes: int
    allocations: int
    """how often memory was taken from the device so far, by all ranks together each time"""
    by_kernel: Mapping[str, int]
    """bytes in arenas, by the name of the kernel that uses them, largest first"""

    @classmethod
    def of(cls, kind: str, leases: Iterable[tuple[str, int]], reserved_bytes: int, allocations: int) -> "MemoryReport":
        """The report of these leases, each with a name and bytes."""
        known, by_kernel = list(leases), dict[str, int]()
        for name, nbytes in known:
            by_kernel[name or "unnamed"] = by_kernel.get(name or "unnamed", 0) + nbytes
        sizes = [nbytes for _, nbytes in known]
        ordered = dict(sorted(by_kernel.items(), key=lambda item: (-item[1], item[0])))
        return cls(kind, reserved_bytes, sum(sizes), max(sizes, default=0), allocations, ordered)

    @property
    def free_bytes(self) -> int:
        """Reserved, and in no arena."""
        return self.reserved_bytes - self.leased_bytes

    def __str__(self) -> str:
        def mib(nbytes: int) -> str:
            return f"{nbytes / (1 << 20):.1f} MiB"

        head = (
            f"arenas by {self.kind}: {mib(self.reserved_bytes)} reserved in {self.allocations} allocations, "
            f"{mib(self.leased_bytes)} in use, {mib(self.free_bytes)} free; the largest has {mib(self.largest_lease_bytes)}"
        )
        return "\n".join([head, *(f"{mib(nbytes):>12}  {name}" for name, nbytes in self.by_kernel.items())])
