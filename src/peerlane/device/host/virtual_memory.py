"""Memory by CUDA's virtual memory management: every rank reserves addresses for the memory of all, and more is mapped behind what is there.

Nothing moves when it grows, so captured graphs stay valid and leases may span what was added. Each rank makes its own memory and passes it
on as a file descriptor; mapped memory lives until the last rank has unmapped it, so no rank waits for others to give it back.
"""

import os
from typing import Any

import torch

from peerlane.device.host import cuda_bindings
from peerlane.device.host.descriptors import Mailbox
from peerlane.device.host.device_memory import GRANULARITY_BYTES, Exchange, bytes_at, checked, together, whole_granules
from peerlane.errors import DeviceError


class VirtualRegion:
    """The addresses of all ranks' memory, as one rank has reserved them, and what is mapped there. ``most_bytes`` of each rank at most."""

    def __init__(self, exchange: Exchange, rank: int, world_size: int, device: torch.device, most_bytes: int) -> None:
        self.rank, self.device = rank, device
        self.nbytes = 0
        self.bases: list[int] = []
        self._exchange, self._world_size, self._most_bytes = exchange, world_size, whole_granules(most_bytes)
        self._mapped: list[tuple[int, int]] = []
        """address and length of what is mapped, step by step"""

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return bytes_at(self.bases[self.rank] + offset, nbytes, self.device)

    def grow(self, nbytes: int) -> None:
        """Collective: add zeroed memory of every rank. Raises DeviceError on all ranks, and has added nothing, if it failed on one."""
        size, steps = whole_granules(nbytes), len(self._mapped)
        with Mailbox(self.rank) as mailbox, _Made() as made:

            def make() -> str:
                self._reserve(size)
                made.create(size, self.device)
                self._map(self.rank, size, made.handle)
                self.tensor(self.nbytes, size).zero_()
                torch.cuda.synchronize(self.device)  # before any peer gets it and may write
                made.export()
                return mailbox.open(self._world_size)

            def map_peers(addresses: list[str]) -> None:
                received = mailbox.trade(addresses, made.descriptor)
                try:
                    for rank, descriptor in received.items():
                        self._map_descriptor(rank, size, descriptor)
                finally:
                    for descriptor in received.values():
                        os.close(descriptor)

            try:
                addresses = together(self._exchange, make)
                together(self._exchange, lambda: map_peers(addresses))
            except DeviceError:
                self._unmap(steps)
                raise
        self.nbytes += size

    def release(self) -> None:
        """Unmap everything. This rank's device no longer uses it; other ranks keep what they have mapped."""
        self._unmap(0)
        driver = cuda_bindings.driver()
        for base in self.bases:
            checked(driver.cuMemAddressFree(base, self._most_bytes), "giving back the addresses of arenas")
        self.bases, self.nbytes = [], 0

    def _reserve(self, size: int) -> None:
        if self.nbytes + size > self._most_bytes:
            raise DeviceError(f"OUT_OF_MEMORY: {self.nbytes} bytes of arenas can not grow by {size}, for the device has {self._most_bytes}")
        driver = cuda_bindings.driver()
        while len(self.bases) < self._world_size:
            base = checked(driver.cuMemAddressReserve(self._most_bytes, GRANULARITY_BYTES, 0, 0), "reserving addresses for arenas")
            self.bases.append(int(base))

    def _map(self, rank: int, size: int, handle: Any) -> None:
        driver, address, what = cuda_bindings.driver(), self.bases[rank] + self.nbytes, f"mapping the arenas of rank {rank}"
        checked(driver.cuMemMap(address, size, 0, handle, 0), what)
        self._mapped.append((address, size))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(driver.cuMemSetAccess(address, size, [access], 1), what)

    def _map_descriptor(self, rank: int, size: int, descriptor: int) -> None:
        driver = cuda_bindings.driver()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = checked(driver.cuMemImportFromShareableHandle(descriptor, kind), f"importing the arenas of rank {rank}")
        try:
            self._map(rank, size, handle)
        finally:
            checked(driver.cuMemRelease(handle), f"letting go of the arenas of rank {rank}")  # it stays as long as it is mapped

    def _unmap(self, steps: int) -> None:
        """Undo all steps behind the first ones."""
        driver = cuda_bindings.driver()
        while len(self._mapped) > steps:
            checked(driver.cuMemUnmap(*self._mapped.pop()), "unmapping arenas")


class _Made:
    """Own memory while it is passed on: afterwards its mappings alone keep it."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.descriptor = -1

    def create(self, size: int, device: torch.device) -> None:
        driver = cuda_bindings.driver()
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.handle = checked(driver.cuMemCreate(size, properties, 0), f"allocating {size} bytes for arenas")

    def export(self) -> None:
        driver = cuda_bindings.driver()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.descriptor = int(checked(driver.cuMemExportToShareableHandle(self.handle, kind, 0), "exporting the memory of arenas"))
        os.set_inheritable(self.descriptor, False)

    def __enter__(self) -> "_Made":
        return self

    def __exit__(self, *error: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self.handle is not None:
            checked(cuda_bindings.driver().cuMemRelease(self.handle), "letting go of own arenas")
