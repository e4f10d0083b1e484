"""A page of host memory that all ranks of a group map, where they can see one folder, and what they agree on through it."""

import mmap
import os
import tempfile
import time
from collections.abc import Callable

from peerlane.device.host.group import MAX_RANKS, Small
from peerlane.device.host.waits import Waits
from peerlane.errors import DeviceTimeout, UsageError

FOLDER = "/dev/shm"


def share_page(exchange: Callable[[Small], list[Small]], rank: int, folder: str | None = None) -> mmap.mmap | None:
    """Collective: a page of zeroes that all ranks share; None on all of them if some can not map it."""
    name = exchange(_make_page(folder or FOLDER) if rank == 0 else None)[0]
    page = _map_page(name)
    shared = all(exchange(page is not None))
    if rank == 0 and name is not None:
        os.unlink(name)
    return page if shared else None


def _make_page(folder: str) -> str | None:
    try:
        file, name = tempfile.mkstemp(prefix="peerlane-page-", dir=folder)
        with open(file, "r+b") as page:
            page.truncate(mmap.PAGESIZE)
    except OSError:
        return None
    return name


def _map_page(name: str | None) -> mmap.mmap | None:
    try:
        with open(name or "", "r+b") as page:
            return mmap.mmap(page.fileno(), mmap.PAGESIZE)
    except OSError:
        return None


_EAGER_POLLS = 2000
_NAP_S = 5e-5
_LOW = 0xFFFFFFFF


class HostBoard:
    """``board(number)``: every rank's number (0 to 2^32 - 1) of this call, by rank. Creating one and calling it are collective.

    A rank has two words, which take turns: a rank that is one call ahead has seen this call of all ranks, and overwrites nothing that is
    still to be read. A word holds the call and the number. Ranks that share no folder use ``exchange`` in every call."""

    def __init__(
        self, exchange: Callable[[Small], list[Small]], rank: int, world_size: int, folder: str = FOLDER, waits: Waits | None = None
    ) -> None:
        self._exchange, self._rank, self._world_size, self._calls = exchange, rank, world_size, 0
        self._waits = waits or Waits()
        page = share_page(exchange, rank, folder)
        self.shared = page is not None
        self._words = None if page is None else memoryview(page).cast("Q")

    def __call__(self, number: int) -> list[int]:
        if not 0 <= number <= _LOW:
            raise UsageError(f"ranks agree on numbers of 32 bits: got {number}; expected 0 to 2^32 - 1")
        if self._words is None:
            return list(self._exchange(number))
        self._calls += 1
        first, call = self._calls % 2 * MAX_RANKS, self._calls & _LOW
        self._words[first + self._rank] = call << 32 | number
        return [self._await(self._words, first, rank, call) for rank in range(self._world_size)]

    def _await(self, words: memoryview, first: int, rank: int, call: int) -> int:
        polls, begin = 0, 0.0
        while (word := words[first + rank]) >> 32 != call:
            polls += 1
            if polls < _EAGER_POLLS:
                os.sched_yield()  # time.sleep(0) takes 50 us since Python 3.11
                continue
            self._waits.check()
            now = time.monotonic()
            begin = begin or now
            if now > begin + self._waits.host_limit_s:
                raise DeviceTimeout(
                    f"rank {rank} did not come to call {self._calls} of rank {self._rank} within {self._waits.host_limit_s:g} s; "
                    "all ranks of a group must make the same calls in the same order"
                )
            time.sleep(_NAP_S)
        return int(word & _LOW)
