"""The memory of a process group's pool: one range of addresses that grows in place where all ranks can, else regions by CUDA IPC."""

import logging

import torch

from peerlane.device.host.device_memory import Exchange, pinned_fault
from peerlane.device.host.group import Small
from peerlane.device.host.ipc_memory import IpcMemory
from peerlane.device.host.pool import Region
from peerlane.device.host.virtual_memory import VirtualRegion
from peerlane.errors import DeviceError

_log = logging.getLogger("peerlane.device.host")


class ProcessMemory:
    """A :class:`~peerlane.device.host.pool.Source`, on one rank. ``grows_in_place`` is set before memory is added, the same on all ranks.

    When such memory can not be had on some rank, all ranks use IPC from then on; what they have stays where it is. One line is logged."""

    def __init__(self, exchange: Exchange, rank: int, world_size: int, device: torch.device, *, grows_in_place: bool = False) -> None:
        self.device, self.grows_in_place = device, grows_in_place
        self._exchange, self._rank, self._world_size = exchange, rank, world_size
        self._virtual: VirtualRegion | None = None
        self._ipc = IpcMemory(exchange, rank, device)

    @property
    def kind(self) -> str:
        return "virtual memory" if self.grows_in_place else "CUDA IPC"

    def exchange(self, value: Small) -> list[Small]:
        return self._exchange(value)

    def add(self, nbytes: int) -> Region:
        try:
            return self._add(nbytes)
        except DeviceError:
            torch.cuda.empty_cache()  # the pool may ask for less: torch holds what it does not use
            raise

    def _add(self, nbytes: int) -> Region:
        if self.grows_in_place:
            if self._virtual is None:
                _, total = torch.cuda.mem_get_info(self.device)
                self._virtual = VirtualRegion(self._exchange, self._rank, self._world_size, self.device, total)
            try:
                self._virtual.grow(nbytes)
                return self._virtual
            except DeviceError as error:
                if "OUT_OF_MEMORY" in str(error):
                    raise
                self.grows_in_place = False
                if self._rank == 0:
                    _log.warning("arenas do not grow in place from now on, but by further allocations: %s", error)
        return self._ipc.add(nbytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def zero(self, region: Region, offset: int, nbytes: int) -> None:
        region.tensor(offset, nbytes).zero_()
        self.synchronize()
        self.exchange(None)

    def release(self) -> None:
        self._ipc.release()
        if self._virtual is not None:
            self._virtual.release()
            self._virtual = None

    def free_released(self) -> None:
        """Collective: free what other ranks had mapped before it was released."""
        self._ipc.free_released()

    def fault_record(self) -> torch.Tensor:
        return pinned_fault()
