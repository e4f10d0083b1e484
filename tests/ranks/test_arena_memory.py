"""Arenas of processes that map each other's memory, on memory files instead of GPUs: growth, reuse, and what is left when a call fails."""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from device.host_driver import HostDriver, bytes_at, host_driver
from peerlane.device.host import descriptors
from peerlane.device.host.descriptors import Mailbox
from peerlane.device.host.ipc import StoreExchange, grows_in_place
from peerlane.device.host.pool import FIRST_BYTES, LEASE_BYTES, Lease, MemoryPool
from peerlane.device.host.process_memory import ProcessMemory
from peerlane.errors import DeviceError, DeviceTimeout
from ranks.pool import RankPool, logged

RANKS = 3


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


@contextlib.contextmanager
def arenas(rank: int, store: Path, *, in_place: bool, limit: int = 1 << 28) -> Iterator[tuple[HostDriver, ProcessMemory, MemoryPool]]:
    exchange = StoreExchange(dist.FileStore(str(store), RANKS), rank, RANKS)
    with host_driver(limit) as driver:
        memory = ProcessMemory(exchange, rank, RANKS, torch.device("cuda", 0), grows_in_place=in_place)
        yield driver, memory, MemoryPool(memory)


def say(rank: int, lease: Lease, what: int) -> None:
    """Every rank writes to the memory of the next one."""
    bytes_at(lease.bases[(rank + 1) % RANKS] + 500, 8).fill_(10 * what + rank)


def heard(rank: int, lease: Lease, what: int) -> bool:
    return bool((lease.tensor(500, 8) == 10 * what + (rank - 1) % RANKS).all())


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def grow_twice(rank: int, world: int, store: Path, in_place: bool) -> dict[str, Any]:
    with arenas(rank, store, in_place=in_place) as (_, memory, pool):
        files = opened()
        first = pool.lease(1000)
        say(rank, first, 1)
        second = pool.lease(FIRST_BYTES)
        say(rank, second, 2)
        third = pool.lease(FIRST_BYTES)
        say(rank, third, 3)
        memory.exchange(None)
        right = [heard(rank, lease, number) for number, lease in enumerate((first, second, third), 1)]
        found = {"right": right, "allocations": pool.allocations, "offsets": [second.offset, third.offset], "kind": memory.kind}
        second.close()
        again = pool.lease(FIRST_BYTES)
        found["zero"] = not again.tensor(0, again.length).any()
        found["same"] = again.bases == second.bases
        for lease in (first, third, again):
            lease.close()
        found["after"] = pool.lease(100).tensor(0, 64).sum().item()
        pool.leases[0].close()
        memory.exchange(None)
        found["left"] = opened() - files if in_place else 0  # with IPC the last memory is freed when more is added
        return found


@pytest.mark.parametrize("in_place", [True, False], ids=["vmm", "ipc"])
def test_memory_grows_is_seen_by_all_and_used_again(in_place: bool, processes: RankPool, tmp_path: Path) -> None:
    step = FIRST_BYTES + LEASE_BYTES
    wanted = {
        "right": [True] * 3,
        "allocations": 3,
        "offsets": [LEASE_BYTES, LEASE_BYTES + step] if in_place else [0, 0],
        "kind": "virtual memory" if in_place else "CUDA IPC",
        "zero": True,
        "same": True,
        "after": 0,
        "left": 0,
    }
    assert processes.run(grow_twice, tmp_path / "store", in_place) == [wanted] * RANKS


def fail(rank: int, world: int, store: Path, step: int, call: str) -> dict[str, Any]:
    """``call`` fails on rank 1 when memory is added for the ``step``-th time."""
    with arenas(rank, store, in_place=True) as (driver, memory, pool), contextlib.ExitStack() as patches:
        lines = patches.enter_context(logged("peerlane.device.host", logging.WARNING))
        patches.enter_context(mock.patch.object(descriptors, "PATIENCE_S", 0.5))
        files, leases = opened(), []
        for number in range(3):
            if number == step and rank == 1:
                if call.startswith("cu"):
                    driver.fails[call] = "CUDA_ERROR_NOT_SUPPORTED"
                else:
                    patches.enter_context(mock.patch.object(socket, call, side_effect=PermissionError("not here")))
            leases.append(pool.lease(FIRST_BYTES))
            say(rank, leases[-1], number)
        memory.exchange(None)
        found = {"right": [heard(rank, lease, number) for number, lease in enumerate(leases)], "kind": memory.kind, "lines": len(lines)}
        for lease in leases:
            lease.close()
        found["again"] = bool(pool.lease(100).tensor(0, 64).any())
        found["files"] = opened() - files
        return found


CREATION = ("AddressReserve", "Create", "Map", "SetAccess", "ExportToShareableHandle", "ImportFromShareableHandle")
FAILURES = [*((0, f"cuMem{name}") for name in CREATION), (0, "socket"), (0, "send_fds"), (1, "cuMemCreate"), (2, "send_fds")]


@pytest.mark.parametrize(("step", "call"), FAILURES)
def test_a_failure_on_one_rank_takes_all_to_ipc(step: int, call: str, processes: RankPool, tmp_path: Path) -> None:
    found = processes.run(fail, tmp_path / "store", step, call)
    same = {"right": [True] * 3, "kind": "CUDA IPC", "again": False, "files": 1}  # one memory file, of the last lease
    assert found == [{**same, "lines": int(rank == 0)} for rank in range(RANKS)]


def fill(rank: int, world: int, store: Path, in_place: bool) -> list[Any]:
    with arenas(rank, store, in_place=in_place, limit=FIRST_BYTES + (4 << 20)) as (_, memory, pool):
        pool.lease(FIRST_BYTES - LEASE_BYTES)
        pool.lease(1 << 20)  # all that is asked for would not fit, what is needed does
        with pytest.raises(DeviceError, match=r"rank 2: .*OUT_OF_MEMORY"):
            pool.lease(8 << 20)
        return [memory.kind, pool.reserved_bytes, pool.lease(100).tensor(0, 64).any().item()]


@pytest.mark.parametrize("in_place", [True, False], ids=["vmm", "ipc"])
def test_a_full_device_is_told_on_all_ranks(in_place: bool, processes: RankPool, tmp_path: Path) -> None:
    kind = "virtual memory" if in_place else "CUDA IPC"
    assert processes.run(fill, tmp_path / "store", in_place) == [[kind, FIRST_BYTES + (2 << 20), False]] * RANKS


def test_a_mailbox_takes_descriptors_of_its_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "PATIENCE_S", 0.3)
    files = opened()
    with Mailbox(0) as own, Mailbox(1) as other, open(os.devnull) as file:
        addresses = [own.open(2), other.open(2)]
        stranger = bytes(16).hex() + addresses[0][32:]
        with Mailbox(1) as forger:
            forger.open(2)
            with pytest.raises(DeviceTimeout, match=r"ranks \[0\] sent no file descriptor"):
                forger.trade([stranger, addresses[1]], file.fileno())
        with pytest.raises(DeviceTimeout, match=r"ranks \[1\] sent no file descriptor"):
            own.trade(addresses, file.fileno())
        # It gets what rank 0 has sent, and throws its own message away.
        with pytest.raises(DeviceTimeout, match=r"ranks \[2\] sent no"):
            other.trade([*addresses, addresses[1]], file.fileno())
    assert opened() == files


def test_arenas_grow_in_place_by_default_on_one_device_alone() -> None:
    assert grows_in_place([("gpu0", None), ("gpu0", None)])
    assert not grows_in_place([("gpu0", None), ("gpu1", None)])
    assert grows_in_place([("gpu0", "vmm"), ("gpu1", "vmm")])
    assert not grows_in_place([("gpu0", "ipc"), ("gpu0", None)])
