"""The cores on which ranks' calling threads are timed: which they may be, and which of them run at full speed now.

On a machine that is shared, a core may run at half its speed for tenths of a second at a time, and a call from Python then takes nearly
twice as long. Neither load nor stolen time tells; how long a fixed piece of Python takes does. The likely reason is a second hardware
thread of the physical core, which the guest does not see and somebody else keeps busy.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator

_MOST = 8  # cores that a rank chooses from
_STEPS, _TRIES = 500, 3
_SLOWER = 1.25  # than the fastest core: no longer full speed; slow cores take about twice as long
_FRESH_S = 0.05  # for so long what was found of a core is relied on by work that is not timed
_CALLS_PER_PART = 2  # of a block, at least

_clock = time.perf_counter
_get_affinity, _set_affinity = os.sched_getaffinity, os.sched_setaffinity


def cores_of_rank(rank: int, world_size: int) -> list[int]:
    """The cores on which a rank's calling thread may be timed: the same for this rank in every group, and no other rank's.

    A thread that the scheduler moves about calls up to twice as slowly for seconds at a time. Only one group is busy at a time, so all
    groups can use the same cores. Half of the machine's, at most; none where there are not more cores than ranks.
    """
    cores = physical_cores(os.sched_getaffinity(0))[1:]
    share = len(cores) // world_size
    mine = cores[rank * share : (rank + 1) * share]
    return mine[: min(_MOST, max(1, share // 2))]


def cores_beside(world_size: int) -> set[int]:
    """The cores on which no rank of such a group is timed, for what runs meanwhile; all of them where there is none to warm group."""
    allowed = os.sched_getaffinity(0)
    timed = {_siblings(cpu) for rank in range(world_size) for cpu in cores_of_rank(rank, world_size)}
    return {cpu for cpu in allowed if _siblings(cpu) not in timed} or allowed


def physical_cores(allowed: set[int]) -> list[int]:
    """One CPU number per physical core among these, ascending."""
    cores: dict[str, int] = {}
    for cpu in sorted(allowed):
        cores.setdefault(_siblings(cpu), cpu)
    return sorted(cores.values())


def _siblings(cpu: int) -> str:
    """The CPUs of the physical core that this one belongs to, as the kernel lists them."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read().strip()
    except OSError:
        return str(cpu)


def parts(calls: int, most: int) -> list[range]:
    """The positions of a timed block's eager calls, in up to ``most`` parts that have a core each: of two calls or more, and one where the
    number is odd.
    """
    count = min(most, -(-calls // _CALLS_PER_PART))
    return [range(calls * part // count, calls * (part + 1) // count) for part in range(count)]


def pace_us() -> float:
    """How long a fixed piece of Python takes on the calling thread's core now, in microseconds: the shortest of a few times."""
    times = []
    for _ in range(_TRIES):
        begin = _clock()
        for _ in range(_STEPS):
            pass
        times.append(_clock() - begin)
    return min(times) * 1e6


class TimedCore:
    """The core of a rank's calling thread while it is timed, one of ``cores``; where there are none, it stays where it is."""

    def __init__(self, cores: list[int]) -> None:
        self._cores, self._place = cores, 0
        self._full_us = 0.0  # of the fastest core that is known; 0: of none
        self._settled_s = -math.inf  # when a core was chosen, on this module's clock

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The calling thread alone stays on the core to which :meth:`settle` moves it in here, and is free afterwards:
        NCCL's threads on the same one would slow it down.
        """
        everywhere = _get_affinity(0)
        try:
            yield
        finally:
            _set_affinity(0, everywhere)

    def settle(self, full_us: float = 0.0, first: int | None = None, further: int = 0) -> float:
        """Moves the calling thread to the next core that runs at full speed, this one if it does, or to the fastest; how fast it is. To be
        called in :meth:`taken`.

        ``full_us``: the pace of the fastest core that anybody knows, if anybody does. Where nobody does, all cores are tried.
        ``first``: the place, modulo their number, of the core that is tried first, instead of this one: threads with the same cores that
        begin at the same place find the same core. ``further``: so many places behind that.
        """
        if not self._cores:
            return pace_us()
        self._full_us = min(filter(None, (full_us, self._full_us)), default=0.0)
        found: dict[int, float] = {}
        begin = (self._place if first is None else first) + further
        for step in range(len(self._cores)):
            place = (begin + step) % len(self._cores)
            self._go(place)
            found[place] = pace_us()
            if found[place] <= _SLOWER * self._full_us:
                break
        fastest = min(found, key=found.__getitem__)
        if fastest != self._place:
            self._go(fastest)
        self._full_us = min(self._full_us or math.inf, found[fastest])
        self._settled_s = _clock()
        return found[fastest]

    def settle_anew(self) -> None:
        """As :meth:`settle`, unless that was less than 50 ms ago: then back to where it went. For work that is not timed: looking takes as
        long as some of it."""
        if not self._cores:
            return
        if _clock() > self._settled_s + _FRESH_S:
            self.settle()
        else:
            self._go(self._place)

    def _go(self, place: int) -> None:
        _set_affinity(0, {self._cores[place]})
        self._place = place
