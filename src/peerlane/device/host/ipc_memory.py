"""Memory of processes that map each other's by legacy CUDA IPC: it grows by further regions, none of which ever moves."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from peerlane.device.host import cuda_bindings
from peerlane.device.host.device_memory import Exchange, bytes_at, checked, together, whole_granules
from peerlane.errors import DeviceError

_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE. The bindings have an attribute for these bytes in some versions only."""


class IpcMemory:
    """The regions of one group's pool, on one of its ranks."""

    def __init__(self, exchange: Exchange, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self._exchange = exchange
        self._regions: list[IpcRegion] = []
        self._released: list[int] = []
        """own memory that other ranks may still map: CUDA forbids to free that"""

    def add(self, nbytes: int) -> "IpcRegion":
        """Collective: a region of zeroes. Raises DeviceError on all ranks if it failed on one."""
        self.free_released()
        region = IpcRegion(self.rank, self.device, whole_granules(nbytes))
        try:
            handles = together(self._exchange, region.allocate)
        except DeviceError:
            region.free()
            raise
        self._regions.append(region)
        try:
            together(self._exchange, lambda: region.map_peers(handles))
        except DeviceError:
            self._forget(region)
            raise
        return region

    def free_released(self) -> None:
        """Collective, if anything was released: free own memory, which no rank maps any more."""
        if self._released:
            self._exchange(None)  # all ranks have unmapped what they released
            while self._released:
                checked(cuda_bindings.driver().cuMemFree(self._released.pop()), "freeing memory of closed arenas")

    def release(self) -> None:
        """Unmap everything; own memory is freed once the other ranks have done so too."""
        for region in list(self._regions):
            self._forget(region)

    def _forget(self, region: "IpcRegion") -> None:
        self._regions.remove(region)
        self._released.append(region.own)
        region.unmap_peers()


class IpcRegion:
    """One allocation of every rank, mapped by all others."""

    def __init__(self, rank: int, device: torch.device, nbytes: int) -> None:
        self.rank, self.device, self.nbytes = rank, device, nbytes
        self.own = 0
        self.bases: Sequence[int] = ()
        self._opened: dict[int, Any] = {}

    def allocate(self) -> str:
        """Zeroed memory; the handle by which other ranks map it."""
        driver = cuda_bindings.driver()
        self.own = int(checked(driver.cuMemAlloc(self.nbytes), f"allocating {self.nbytes} bytes for arenas"))
        self.tensor(0, self.nbytes).zero_()
        torch.cuda.synchronize(self.device)  # before any peer gets the handle and may write
        handle = checked(driver.cuIpcGetMemHandle(self.own), "exporting the memory of arenas")
        return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES).hex()

    def free(self) -> None:
        """Give back memory that no other rank has mapped."""
        if self.own:
            checked(cuda_bindings.driver().cuMemFree(self.own), "freeing memory that not all ranks have got")

    def map_peers(self, handles: Sequence[str]) -> None:
        """Map every rank's memory."""
        driver = cuda_bindings.driver()
        flags = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        for rank, text in enumerate(handles):
            if rank == self.rank:
                continue
            handle = driver.CUipcMemHandle()
            ctypes.memmove(int(handle.getPtr()), bytes.fromhex(text), _HANDLE_BYTES)
            self._opened[rank] = checked(
                driver.cuIpcOpenMemHandle(handle, flags),
                f"mapping the arenas of rank {rank} (do all ranks see each other's GPUs in CUDA_VISIBLE_DEVICES, and does "
                "`nvidia-smi topo -p2p rw` say that they can address each other?)",
            )
        self.bases = [int(self._opened.get(rank, self.own)) for rank in range(len(handles))]

    def unmap_peers(self) -> None:
        """The other ranks may free their memory once all have done so."""
        driver = cuda_bindings.driver()
        for rank, pointer in self._opened.items():
            checked(driver.cuIpcCloseMemHandle(pointer), f"unmapping the arenas of rank {rank}")
        self._opened.clear()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return bytes_at(self.own + offset, nbytes, self.device)
