"""Groups of processes, each with a GPU or a share of one, which map each other's memory. They never use NVLink multicast."""

from __future__ import annotations

import contextlib
import json
import socket
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.device.host.cuda_group import CudaGroup
from peerlane.device.host.group import Group, Small
from peerlane.device.host.host_board import HostBoard
from peerlane.device.host.process_memory import ProcessMemory
from peerlane.errors import DeviceTimeout, PeerlaneError, UsageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PATIENCE = timedelta(seconds=300)
_groups: WeakKeyDictionary[dist.ProcessGroup, ProcessGroupRanks] = WeakKeyDictionary()
"""Weak keys: an entry ends with its process group, once that is destroyed."""


def process_group(group: dist.ProcessGroup | None) -> ProcessGroupRanks:
    """The ranks of ``group`` (default: all). The first call for a process group is collective.

    When the process group is no more, the memory of what ``per_group`` keeps goes back. Close arenas and communicators of your own before.
    """
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise UsageError("there is no process group; call torch.distributed.init_process_group first")
    if chosen not in _groups:
        _groups[chosen] = ProcessGroupRanks(chosen)
        weakref.finalize(chosen, _give_back, _groups[chosen]).atexit = False  # the end of the process frees it
    return _groups[chosen]


def _give_back(ranks: Group) -> None:
    with contextlib.suppress(RuntimeError, PeerlaneError):  # a lost device: its memory is gone with it
        ranks.close()


class ProcessGroupRanks(CudaGroup):
    """The ranks of a torch.distributed process group, one process each, on the current CUDA device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = group.get_group_store()
        if store is None:
            raise UsageError(f"{type(group).__name__} has no store; pass a group that init_process_group or new_group has made")
        rank, device = group.rank(), torch.device("cuda", torch.cuda.current_device())
        self._exchange = StoreExchange(store, rank, group.size())
        memory = ProcessMemory(self._exchange, rank, group.size(), device)
        super().__init__(rank, group.size(), device, memory)
        self._board: HostBoard | None = None
        self.runs_together = True
        properties = torch.cuda.get_device_properties(device)
        seen = self.exchange([host_name(), str(properties.uuid), properties.multi_processor_count, settings.arena_memory()])
        memory.grows_in_place = grows_in_place([(uuid, choice) for _, uuid, _, choice in seen])
        self.ranks_per_device, self.sm_count = shares([(host, uuid, count) for host, uuid, count, _ in seen], settings.ranks_per_gpu())
        self.takes_turns = not settings.runs_under_mps()

    def exchange(self, value: Small) -> list[Small]:
        self.cache.exchanged()
        return self._exchange(value)

    def agree(self, number: int) -> list[int]:
        if self._board is None:
            self._board = HostBoard(self._exchange, self.rank, self.world_size)
        return self._board(number)


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


def grows_in_place(members: Sequence[tuple[str, str | None]]) -> bool:
    """Whether arenas use virtual memory management, from every rank's device and setting: by default where all ranks share one device."""
    shared = len({device for device, _ in members}) == 1
    return all(choice == "vmm" or (choice is None and shared) for _, choice in members)


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
