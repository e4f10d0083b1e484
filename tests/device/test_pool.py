"""A group's pool of memory: where leases lie, when memory is used again, and what ranks that disagree are told."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from device.pool_doubles import RANKS, HostMemory, Meeting
from peerlane.device.host import pool as pools
from peerlane.device.host.device_memory import pinned_fault, pinned_word
from peerlane.device.host.pool import FreeList, Lease, MemoryPool
from peerlane.errors import DeviceError, UsageError

LEASE_BYTES, FIRST_BYTES = 256, 4096


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to fill and compare."""
    monkeypatch.setattr(pools, "LEASE_BYTES", LEASE_BYTES)
    monkeypatch.setattr(pools, "FIRST_BYTES", FIRST_BYTES)


def on_all(run: Callable[[MemoryPool, HostMemory], Any], *, grows_in_place: bool = False, meeting: Meeting | None = None) -> list[Any]:
    """What ``run`` gives on every rank."""
    meeting = meeting or Meeting()

    def member(rank: int) -> Any:
        source = HostMemory(meeting, rank, grows_in_place)
        return run(MemoryPool(source), source)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(member, range(RANKS)))


def test_free_neighbours_become_one() -> None:
    parts = FreeList()
    parts.grow(100)
    for offset, length in ((0, 20), (20, 30), (50, 50)):
        assert parts.fit(length) == offset
        parts.take(offset, length)
    assert (parts.free, parts.tail, parts.fit(1)) == (0, 0, None)
    parts.give(0, 20)
    parts.give(50, 50)
    assert (parts.fit(20), parts.fit(21), parts.fit(51), parts.tail) == (0, 50, None, 50)
    parts.give(20, 30)
    assert (parts.fit(100), parts.free, parts.tail) == (0, 100, 100)
    parts.take(0, 100)
    parts.grow(10)
    parts.give(90, 10)
    assert (parts.fit(20), parts.touched, parts.nbytes) == (90, 100, 110)


@pytest.mark.parametrize("grows_in_place", [False, True])
def test_random_leases_never_overlap_and_are_zero(grows_in_place: bool) -> None:
    def run(pool: MemoryPool, source: HostMemory) -> list[tuple[int, int]]:
        draw, kept, places = random.Random(0), list[Lease](), []
        first = pool.lease(1)  # so that the memory is never given back as a whole
        for step in range(300):
            if kept and draw.random() < 0.5:
                kept.pop(draw.randrange(len(kept))).close()
                continue
            lease = pool.lease(draw.randrange(1, 5000), f"kernel {step % 7}")
            own = lease.tensor(0, lease.length)
            assert not own.any()
            own.fill_(1 + step % 255)
            kept.append(lease)
            places.append((lease.offset, lease.length))
            for other in kept:
                held = other.tensor(0, other.length)
                assert held[0] and torch.equal(held, held[:1].expand_as(held))
        for lease in [first, *kept]:
            lease.close()
        assert source.done[-1] == "release" and pool.reserved_bytes == 0
        return places

    first, *others = on_all(run, grows_in_place=grows_in_place)
    assert all(places == first for places in others)
    assert all(offset % LEASE_BYTES == 0 == length % LEASE_BYTES for offset, length in first)


@pytest.mark.parametrize("grows_in_place", [False, True])
def test_allocations_grow_with_the_logarithm_of_the_leases(grows_in_place: bool) -> None:
    def run(pool: MemoryPool, source: HostMemory) -> tuple[int, int]:
        for _ in range(400):
            pool.lease(4000)
        return pool.allocations, pool.reserved_bytes

    ((allocations, reserved), *_) = on_all(run, grows_in_place=grows_in_place)
    assert allocations <= 20, "half as much again each time"
    assert reserved <= 1.5 * 401 * (4000 + LEASE_BYTES)


def test_leases_span_growth_where_memory_grows_in_place() -> None:
    def run(pool: MemoryPool, source: HostMemory) -> tuple[int, int, int]:
        pool.lease(FIRST_BYTES - 2 * LEASE_BYTES)
        lease = pool.lease(FIRST_BYTES)
        return lease.offset, pool.allocations, len(source.regions)

    assert on_all(run, grows_in_place=True) == [(FIRST_BYTES - LEASE_BYTES, 2, 1)] * RANKS
    assert on_all(run, grows_in_place=False) == [(0, 2, 2)] * RANKS


def test_used_memory_is_zeroed_between_two_meetings() -> None:
    def run(pool: MemoryPool, source: HostMemory) -> list[str]:
        pool.lease(100)
        second = pool.lease(100)
        assert source.done == ["synchronize", "meet", "add", "meet"], "fresh memory needs one meeting, and no waiting"
        second.tensor(0, 64).fill_(7)
        second.close()
        source.done.clear()
        third = pool.lease(100)
        assert third.offset == second.offset and not third.tensor(0, 64).any()
        return source.done

    assert on_all(run) == [["synchronize", "meet", "zero", "meet"]] * RANKS


def test_memory_that_is_short_is_asked_for_as_needed() -> None:
    meeting = Meeting()
    meeting.limit = FIRST_BYTES + 2000

    def run(pool: MemoryPool, source: HostMemory) -> int:
        pool.lease(FIRST_BYTES - LEASE_BYTES - 128)
        pool.lease(1500)
        with pytest.raises(DeviceError, match="out of memory"):
            pool.lease(4000)
        return pool.lease(100).offset

    assert on_all(run, meeting=meeting) == [FIRST_BYTES - LEASE_BYTES] * RANKS


def disagreements() -> Iterator[tuple[Callable[[MemoryPool, int], None], str]]:
    yield lambda pool, rank: pool.lease(64 + 64 * rank), r"different sizes: \[64, 128, 192\] bytes"

    def one_rank_closes(pool: MemoryPool, rank: int) -> None:
        lease = pool.lease(64)
        pool.lease(64)
        if rank == 1:
            lease.close()
        pool.lease(64)

    yield one_rank_closes, r"rank 1: region 0, offset 0.*close the same arenas in the same order"


@pytest.mark.parametrize(("act", "told"), list(disagreements()))
def test_ranks_that_disagree_are_all_told(act: Callable[[MemoryPool, int], None], told: str) -> None:
    def run(pool: MemoryPool, source: HostMemory) -> str:
        with pytest.raises(UsageError, match=told) as caught:
            act(pool, source.rank)
        return str(caught.value)

    assert len(set(on_all(run))) == 1


def test_a_report_tells_bytes_and_who_has_them() -> None:
    def run(pool: MemoryPool, source: HostMemory) -> tuple[Any, str]:
        for nbytes, name in ((100, "ring"), (3000, "gemm"), (100, "ring"), (10, "")):
            pool.lease(nbytes, name)
        pool.leases[2].close()
        return pool.report(), str(pool.report())

    ((report, text), *_) = on_all(run)
    assert report.by_kernel == {"gemm": 13 * LEASE_BYTES, "ring": LEASE_BYTES, "unnamed": LEASE_BYTES}
    assert (report.reserved_bytes, report.leased_bytes, report.free_bytes) == (FIRST_BYTES, 15 * LEASE_BYTES, LEASE_BYTES)
    assert (report.allocations, report.largest_lease_bytes, report.kind) == (1, 13 * LEASE_BYTES, "lists")
    assert "arenas by lists: 0.0 MiB reserved in 1 allocations" in text and text.splitlines()[1].endswith("gemm")


def test_shared_words_lie_on_the_host_for_any_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory, **rest: zeros(*shape, **rest))
    with torch.device("meta"):
        assert {words().device.type for words in (pinned_word, pinned_fault)} == {"cpu"}
