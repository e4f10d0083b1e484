"""Groups of processes, each with a GPU or a share of one, which map each other's memory. They never use NVLink multicast."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import mmap
import socket
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.device.host import cuda_bindings
from peerlane.device.host.call_order import call_order
from peerlane.device.host.cuda_group import CudaGroup
from peerlane.device.host.device_memory import checked, pinned_word
from peerlane.device.host.group import Group, Small, one_host
from peerlane.device.host.lane import lane_of
from peerlane.device.host.process_memory import ProcessMemory
from peerlane.device.host.shared_page import HostBoard, share_page
from peerlane.device.host.waits import DEFAULT_LIMIT_S, LONGEST_LIMIT_S, Waits
from peerlane.device.host.watch import Life, Watch
from peerlane.errors import DeviceError, DeviceTimeout, PeerlaneError, UsageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STEP_S = 1.0
_LEFT_AT = 64  # in the page with the stop word: a byte of each rank
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


def known_group(group: dist.ProcessGroup) -> ProcessGroupRanks | None:
    """The ranks of a process group, if there was a call of ``process_group`` for it."""
    return _groups.get(group)


def leave(group: dist.ProcessGroup) -> None:
    """The process group ends on this rank: the other ranks need not miss it."""
    ranks = _groups.get(group)
    if ranks is not None and ranks.watch is not None:
        ranks.watch.leave()


class ProcessGroupRanks(CudaGroup):
    """The ranks of a torch.distributed process group, one process each, on the current CUDA device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = group.get_group_store()
        if store is None:
            raise UsageError(f"{type(group).__name__} has no store; pass a group that init_process_group or new_group has made")
        rank, device = group.rank(), torch.device("cuda", torch.cuda.current_device())
        waits = _waits_of(group)
        self._exchange = StoreExchange(store, rank, group.size(), waits)
        self._memory = memory = ProcessMemory(self._exchange, rank, group.size(), device)
        super().__init__(rank, group.size(), device, memory)
        self.waits, self.lane = waits, lane_of(device)
        self.watch = None if waits.traps else self._begin_watch(group, store)
        if settings.checks_calls():
            name = getattr(group, "common_name", group.group_name)
            self.check_call = functools.partial(_check_call, name, dist.get_process_group_ranks(group), waits)
        self._board: HostBoard | None = None
        self.runs_together = True
        properties = torch.cuda.get_device_properties(device)
        seen = self.exchange([host_name(), str(properties.uuid), properties.multi_processor_count, settings.arena_memory()])
        memory.grows_in_place = grows_in_place([(uuid, choice) for _, uuid, _, choice in seen])
        self.ranks_per_device, self.sm_count = shares([(host, uuid, count) for host, uuid, count, _ in seen], settings.ranks_per_gpu())
        self.takes_turns = not settings.runs_under_mps()
        if waits.traps:
            waits.set_limit(self.wait_limit_s(waits.limit_s))

    def exchange(self, value: Small) -> list[Small]:
        self.cache.exchanged()
        return self._exchange(value)

    def free_closed(self) -> None:
        self._memory.free_released()

    def agree(self, number: int) -> list[int]:
        if self._board is None:
            self._board = HostBoard(self._exchange, self.rank, self.world_size, waits=self.waits)
        return self._board(number)

    def _begin_watch(self, group: dist.ProcessGroup, store: Any) -> Watch:
        """Collective: shares the stop word, and begins to watch over the other ranks."""
        page = share_page(self._exchange, self.rank)
        self.waits.share(*stop_word(page))
        own = Life.own()
        lives = [Life(*fields) for fields in self.exchange([own.pid, own.started, own.space])]
        left = None if page is None else memoryview(page)[_LEFT_AT : _LEFT_AT + self.world_size]
        seen = weakref.ref(group)
        known = dist.distributed_c10d._world.pg_map
        return Watch(
            store, self.rank, lives, self.waits, left=left,
            destroyed=lambda: seen() is None or seen() not in known,
            limit=lambda: _limit_of(seen()),
        )  # fmt: skip


def stop_word(page: mmap.mmap | None) -> tuple[Any, int]:
    """A word of host memory that kernels read and write, and its address for them: of a page that ranks share, or a private one. It is
    never given back: kernels of a group that has stopped may still look at it."""
    if page is not None:
        word = (ctypes.c_uint32 * 1).from_buffer(page)
        driver, place = cuda_bindings.driver(), ctypes.addressof(word)
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            checked(driver.cuMemHostRegister(place, len(page), flags), "sharing a page of host memory with the GPU")
            address = int(checked(driver.cuMemHostGetDevicePointer(place, 0), "finding a page of host memory on the GPU"))
        except DeviceError as error:
            _log.info("ranks tell each other by the store alone when waits end: %s", error)
        else:
            _kept.append(page)
            return word, address
    pinned = pinned_word()
    _kept.append(pinned)
    return (ctypes.c_uint32 * 1).from_address(pinned.data_ptr()), pinned.data_ptr()


_kept: list[Any] = []
_log = logging.getLogger("peerlane.device")


def host_name() -> str:
    """This machine's, or that of the node of a virtual cluster on it. Containers of one machine can have one name, so the boot identifier
    is a part of it."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return "/".join(part for part in (socket.gethostname(), boot, settings.virtual_host()) if part)


class StoreExchange:
    """Exchange of small values through the store of a process group: no device takes part."""

    def __init__(self, store: Any, rank: int, world_size: int, waits: Waits | None = None) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._waits = waits or Waits()
        self._rounds = 0

    def __call__(self, value: Small) -> list[Small]:
        number, self._rounds = self._rounds, self._rounds + 1
        self._store.set(f"peerlane/{number}/{self._rank}", json.dumps(value))
        keys = [f"peerlane/{number}/{rank}" for rank in range(self._world_size)]
        self._wait(keys, number)
        found = [json.loads(self._store.get(key)) for key in keys]
        if number >= 2:  # every rank has read that round, or it would not have come to the last one
            self._store.delete_key(f"peerlane/{number - 2}/{self._rank}")
        return found

    def _wait(self, keys: list[str], number: int) -> None:
        """Waits in short steps, because a rank may die meanwhile."""
        begin = time.monotonic()
        step_s = min(_STEP_S, self._waits.host_limit_s)
        while True:
            step = time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=step_s))
                return
            except RuntimeError as error:
                self._waits.check()
                time.sleep(max(0.0, step + step_s - time.monotonic()))  # where it fails at once
                if time.monotonic() - begin < self._waits.host_limit_s and not isinstance(error, dist.DistNetworkError):
                    continue
                raise DeviceTimeout(
                    f"{self._missing(keys)} did not come to exchange number {number} within {time.monotonic() - begin:.0f} s; "
                    "all ranks of a group must create the same arenas and communicators in the same order"
                ) from error

    def _missing(self, keys: list[str]) -> str:
        try:
            return f"ranks {[rank for rank, key in enumerate(keys) if not self._store.check([key])]}"
        except RuntimeError:
            return "the store has gone, and other ranks"


def _check_call(group: str, members: Sequence[int], waits: Waits, kernel: str) -> None:
    call_order().enter(group, members, kernel, waits.limit_s)


def _waits_of(group: dist.ProcessGroup) -> Waits:
    """The waits of a process group's kernels: they follow its timeout, unless the process has a limit of its own."""
    own = settings.wait_limit_s()
    if own is not None:
        return Waits(own, traps=True)
    known: Waits | None = getattr(group, "waits", None)
    return known or Waits(_limit_of(group) or DEFAULT_LIMIT_S)


def _limit_of(group: Any) -> float | None:
    """The timeout of a process group in seconds, as it is now; None if it does not say. At most the longest that kernels know."""
    timeout = None
    with contextlib.suppress(Exception):  # a group of a kind that says nothing, or one that is about to end
        own = getattr(group, "current_timeout", None)
        timeout = own() if own is not None else _backend_of(group).options._timeout
    return min(timeout.total_seconds(), LONGEST_LIMIT_S) if isinstance(timeout, timedelta) and timeout > timedelta(0) else None


def _backend_of(group: Any) -> Any:
    devices = [device for device in group._device_types if device.type == "cuda"] or group._device_types
    return group._get_backend(devices[0])


def grows_in_place(members: Sequence[tuple[str, str | None]]) -> bool:
    """Whether arenas use virtual memory management, from every rank's device and setting: by default where all ranks share one device."""
    shared = len({device for device, _ in members}) == 1
    return all(choice == "vmm" or (choice is None and shared) for _, choice in members)


def shares(members: Sequence[tuple[str, str, int]], at_least: int = 1) -> tuple[int, int]:
    """Ranks of the fullest device and SMs of the smallest share, from every rank's host, device and number of SMs.

    ``at_least`` as many ranks are on every device, for other groups' kernels wait on its SMs as well. Raises UsageError unless all ranks
    are on one host."""
    one_host([host for host, _, _ in members])
    devices = [device for _, device, _ in members]
    on = {device: max(at_least, devices.count(device)) for device in devices}
    return max(on.values()), min(max(1, count // on[device]) for _, device, count in members)
