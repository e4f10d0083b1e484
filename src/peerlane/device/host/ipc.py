"""Groups of processes, each with a GPU or a share of one; they reach each other's memory by CUDA IPC, which never uses NVLink multicast."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.device.host import cuda_bindings
from peerlane.device.host.cuda_group import GRANULARITY_BYTES, CudaGroup, DeviceMemory, checked, pinned_fault
from peerlane.device.host.group import Small
from peerlane.device.host.host_board import HostBoard
from peerlane.device.host.layout import LINE_BYTES, Layout
from peerlane.errors import DeviceTimeout, UsageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PATIENCE = timedelta(seconds=300)
_groups: WeakKeyDictionary[dist.ProcessGroup, ProcessGroupRanks] = WeakKeyDictionary()
"""Weak keys: an entry ends with its process group, once that is destroyed."""


def process_group(group: dist.ProcessGroup | None) -> ProcessGroupRanks:
    """The ranks of ``group`` (default: all). The first call for a process group is collective.

    Close its arenas and communicators before the process group is destroyed: their device memory is not freed with it.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise UsageError("there is no process group; call torch.distributed.init_process_group first")
    if chosen not in _groups:
        _groups[chosen] = ProcessGroupRanks(chosen)
    return _groups[chosen]


class ProcessGroupRanks(CudaGroup):
    """The ranks of a torch.distributed process group, one process each, on the current CUDA device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size(), torch.device("cuda", torch.cuda.current_device()))
        store = group.get_group_store()
        if store is None:
            raise UsageError(f"{type(group).__name__} has no store; pass a group that init_process_group or new_group has made")
        self._exchange = StoreExchange(store, self.rank, self.world_size)
        self._board: HostBoard | None = None
        self.closed: list[Any] = []
        """memory of closed arenas, which is freed when the next arena is made: other ranks may still map it"""
        self.runs_together = True
        properties = torch.cuda.get_device_properties(self.device)
        seen = self.exchange([host_name(), str(properties.uuid), properties.multi_processor_count])
        self.ranks_per_device, self.sm_count = shares([(host, device, count) for host, device, count in seen], settings.ranks_per_gpu())
        self.takes_turns = not settings.runs_under_mps()

    def exchange(self, value: Small) -> list[Small]:
        return self._exchange(value)

    def agree(self, number: int) -> list[int]:
        if self._board is None:
            self._board = HostBoard(self._exchange, self.rank, self.world_size)
        return self._board(number)

    def allocate(self, nbytes: int) -> IpcMemory:
        memory = IpcMemory(self, nbytes)
        # All ranks have come to its exchange, and have unmapped what they closed before: CUDA forbids to free memory that is still mapped.
        while self.closed:
            checked(cuda_bindings.driver().cuMemFree(self.closed.pop()), "freeing a closed arena")
        return memory


def host_name() -> str:
    """This machine's. Containers of one machine can have one name, so the boot identifier is a part of it."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()}/{boot}"


class StoreExchange:
    """Exchange of small values through the store of a process group: no device takes part."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._rounds = 0

    def __call__(self, value: Small) -> list[Small]:
        number, self._rounds = self._rounds, self._rounds + 1
        self._store.set(f"peerlane/{number}/{self._rank}", json.dumps(value))
        keys = [f"peerlane/{number}/{rank}" for rank in range(self._world_size)]
        try:
            self._store.wait(keys, _PATIENCE)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise DeviceTimeout(
                f"ranks {missing} did not come to exchange number {number} within {_PATIENCE.total_seconds():g} s; "
                "all ranks of a group must create the same arenas and communicators in the same order"
            ) from error
        found = [json.loads(self._store.get(key)) for key in keys]
        if number >= 2:  # every rank has read that round, or it would not have come to the last one
            self._store.delete_key(f"peerlane/{number - 2}/{self._rank}")
        return found


def shares(members: Sequence[tuple[str, str, int]], at_least: int = 1) -> tuple[int, int]:
    """Ranks of the fullest device and SMs of the smallest share, from every rank's host, device and number of SMs.

    ``at_least`` as many ranks are on every device, for other groups' kernels wait on its SMs as well. Raises UsageError unless all ranks
    are on one host."""
    hosts = [host for host, _, _ in members]
    if len(set(hosts)) != 1:
        elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        raise UsageError(f"ranks {elsewhere} are on another host than rank 0; a group spans one node: pass a group of one host's ranks")
    devices = [device for _, device, _ in members]
    on = {device: max(at_least, devices.count(device)) for device in devices}
    return max(on.values()), min(max(1, count // on[device]) for _, device, count in members)


class IpcMemory:
    """One allocation per rank, mapped by all others."""

    def __init__(self, group: ProcessGroupRanks, nbytes: int) -> None:
        self.group, self.nbytes = group, -(-(nbytes + LINE_BYTES) // GRANULARITY_BYTES) * GRANULARITY_BYTES
        self.layout = Layout(self.nbytes, reserved=LINE_BYTES)
        self._opened: dict[int, Any] = {}
        driver = cuda_bindings.driver()
        self._own = checked(driver.cuMemAlloc(self.nbytes), f"allocating {self.nbytes} bytes for an arena")
        self._memory: torch.Tensor | None = torch.as_tensor(DeviceMemory(int(self._own), self.nbytes), device=group.device)
        self._memory.zero_()
        torch.cuda.synchronize(group.device)  # before any peer gets the handle and may write
        self._fault = pinned_fault()
        self.fault = self._fault.data_ptr()
        self.bases = self._open_peers()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            raise UsageError("the arena is closed; create a new one")
        return self._memory[offset : offset + nbytes]

    def fault_words(self) -> list[int]:
        return self._fault.tolist()

    def close(self) -> None:
        if self._memory is None:
            return
        self._memory = None
        torch.cuda.synchronize(self.group.device)
        driver = cuda_bindings.driver()
        for rank, pointer in self._opened.items():
            checked(driver.cuIpcCloseMemHandle(pointer), f"unmapping the arena of rank {rank}")
        self._opened.clear()
        self.group.closed.append(self._own)

    def _open_peers(self) -> list[int]:
        """Where every rank's memory is mapped here."""
        driver = cuda_bindings.driver()
        handle = checked(driver.cuIpcGetMemHandle(self._own), "exporting the arena")
        flags = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        bases = []
        for rank, text in enumerate(self.group.exchange(bytes(handle.reserved).hex())):
            if rank == self.group.rank:
                bases.append(int(self._own))
                continue
            peer = driver.CUipcMemHandle()
            peer.reserved = bytes.fromhex(text)
            self._opened[rank] = checked(
                driver.cuIpcOpenMemHandle(peer, flags),
                f"mapping the arena of rank {rank} (do all ranks see each other's GPUs in CUDA_VISIBLE_DEVICES, and does "
                "`nvidia-smi topo -p2p rw` say that they can address each other?)",
            )
            bases.append(int(self._opened[rank]))
        return bases
