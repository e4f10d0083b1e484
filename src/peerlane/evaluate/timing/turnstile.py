"""A turnstile: locked calls are let through one at a time, by keys that the supervisor hands out and a clock that it alone reads.

The inputs of such a call lie locked in the arena of every rank, under a key of its own. The supervisor gives the ranks their keys when all
of them have come to the call, and a rank the next one not before it has committed itself to what this call returned, by a digest of it. So
what ranks do with a locked call's contents cannot be done before the keys are there, nor put off until the next ones are: it passes between
the two.

Supervisor and rank meet in the last page of the rank's memory file. The supervisor believes nothing that it reads there: a rank that
commits itself early does so to an answer that it does not have. No CUDA here, and no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup

KEY_BYTES = 32
_LOOK_S = 0.002  # between looks at whether a rank has failed, while calls are awaited
_clock = time.perf_counter


class Page(ctypes.Structure):
    """What supervisor and rank tell each other; every writer has cache lines of its own.

    ``begun``: the ticket of the latest locked call that the rank has come to. ``key`` is that of the call ``released``. ``digest``
    is of what the call ``committed`` returned. A call's ticket is larger than any before it.
    """

    _fields_ = (
        ("begun", ctypes.c_uint64),
        ("_unused", ctypes.c_uint64 * 15),
        ("key", ctypes.c_ubyte * KEY_BYTES),
        ("released", ctypes.c_uint64),
        ("_unused_too", ctypes.c_uint64 * 11),
        ("digest", ctypes.c_uint64 * 2),
        ("committed", ctypes.c_uint64),
        ("_unused_as_well", ctypes.c_uint64 * 13),
    )

    @staticmethod
    def of(memory_fd: int) -> Page:
        """The page of a rank with this memory file, for as long as it is held."""
        size = mmap.PAGESIZE
        return Page.from_buffer(mmap.mmap(memory_fd, size, offset=os.fstat(memory_fd).st_size - size))


@dataclass(frozen=True)
class LockedCalls:
    """Which calls of a block or pass are locked: position, slot, and ticket of each, and the keys of their slots, one for every rank."""

    calls: tuple[tuple[int, int, int], ...] = ()
    keys: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)

    @staticmethod
    def draw(order: Sequence[int], positions: Collection[int], first_ticket: int, world_size: int) -> LockedCalls:
        """The calls at these positions of an order, with new keys; no slot may come twice there."""
        places = sorted(positions)
        calls = tuple((position, order[position], ticket) for ticket, position in enumerate(places, first_ticket))
        return LockedCalls(calls, {slot: tuple(secrets.token_bytes(KEY_BYTES) for _ in range(world_size)) for _, slot, _ in calls})

    def written_keys(self, rank: int) -> dict[int, str]:
        """A rank's keys in hexadecimal, for requests to trusted ranks."""
        return {slot: keys[rank].hex() for slot, keys in self.keys.items()}


NOTHING_LOCKED = LockedCalls()


@dataclass(frozen=True)
class Passage:
    """A locked call that was let through: its position, its slot, what every rank committed itself to, how long it took from the first key
    to the last commitment, and how long every rank waited for its key, in microseconds. What a call takes holds unlocking, copying the
    answer and digesting it."""

    position: int
    slot: int
    digests: tuple[tuple[int, int], ...]
    us: float
    waited_us: tuple[float, ...]


def ask_and_let_through(
    group: RankGroup, requests: Message | Sequence[Message], locked: LockedCalls, phase: str, deadline_s: float, *, together: bool = True
) -> tuple[list[Message], list[Passage]]:
    """As :meth:`RankGroup.ask`; meanwhile lets the locked calls through, ``together`` or each rank when it comes. Raises GroupFailure, also
    for ranks that answer before that is done. Keeps its core busy, for a look late is a call that seems long.

    A rank that has not come yet has not had its key, and so has given nothing of its contents to others: time that ranks spend in a call
    before all of them are there is no time for its work. Under stress, where nothing is timed, they are better out of step.
    """
    if not locked.calls:
        return group.ask(requests, phase, deadline_s), []
    turnstiles = [_Turnstile(Page.of(group.memory_fd(rank)), rank, locked) for rank in range(group.world_size)]
    begin = time.monotonic()
    end, look = begin + deadline_s, begin + _LOOK_S
    group.begin(requests, phase, deadline_s)
    waiting: list[int] = []
    while not _turn(turnstiles, together):
        os.sched_yield()
        if (now := time.monotonic()) > look:
            answering = group.answering_ranks
            if now > end or any(not turnstiles[rank].has_said_all for rank in answering):  # who answers says nothing any more
                waiting = [rank for rank, turnstile in enumerate(turnstiles) if turnstile.waits]
                for rank in waiting:  # for what does not come: it may end by itself
                    turnstiles[rank].release(_clock())
                break
            look = now + _LOOK_S
    try:
        answers = group.finish()
    except GroupFailure as failure:
        failure.ranks = tuple(rank for rank in failure.ranks if rank not in waiting)
        raise
    if not _turn(turnstiles, together):
        raise GroupFailure("garbage", phase, "a rank answered before all of its locked calls had been let through")
    passages = []
    for (position, slot, _), ranks in zip(locked.calls, zip(*(turnstile.passed for turnstile in turnstiles), strict=True), strict=True):
        us = 1e6 * (max(rank.ended_s for rank in ranks) - min(rank.released_s for rank in ranks))
        waited_us = tuple(1e6 * (rank.released_s - rank.begun_s) for rank in ranks)
        passages.append(Passage(position, slot, tuple(rank.digest for rank in ranks), us, waited_us))
    return answers, passages


def _turn(turnstiles: Sequence[_Turnstile], together: bool) -> bool:
    """Goes on as far as the ranks have; True when all calls are through."""
    for turnstile in turnstiles:
        turnstile.look()
    waiting = [turnstile for turnstile in turnstiles if turnstile.waits]
    if waiting and (len(waiting) == len(turnstiles) or not together):
        now = _clock()
        for turnstile in waiting:
            turnstile.release(now)
    return all(turnstile.done for turnstile in turnstiles)


class _Passed(NamedTuple):
    """When a rank had come to a call, when it got its key, when it committed itself, and to what."""

    begun_s: float
    released_s: float
    ended_s: float
    digest: tuple[int, int]


class _Turnstile:
    """One rank's; ``passed``: its calls that are through."""

    def __init__(self, page: Page, rank: int, locked: LockedCalls) -> None:
        self._page = page
        self._calls = [(ticket, locked.keys[slot][rank]) for _, slot, ticket in locked.calls]
        self._begun_s: float | None = None
        self._released_s: float | None = None
        self.passed: list[_Passed] = []

    @property
    def done(self) -> bool:
        """Whether all of its calls are through."""
        return len(self.passed) == len(self._calls)

    @property
    def waits(self) -> bool:
        """Whether the rank has come to a call whose key it has not got."""
        return self._begun_s is not None and self._released_s is None

    @property
    def has_said_all(self) -> bool:
        """Whether the rank has come to its last call, and committed itself to that."""
        return bool(min(self._page.begun, self._page.committed) >= self._calls[-1][0])

    def look(self) -> None:
        """Takes in what the rank says of its next call."""
        if self.done:
            return
        ticket, _ = self._calls[len(self.passed)]
        if self._begun_s is None:
            if self._page.begun >= ticket:
                self._begun_s = _clock()
        elif self._released_s is not None and self._page.committed >= ticket:
            self.passed.append(_Passed(self._begun_s, self._released_s, _clock(), (self._page.digest[0], self._page.digest[1])))
            self._begun_s = self._released_s = None

    def release(self, now: float) -> None:
        """Gives the key of the call that it waits at."""
        ticket, key = self._calls[len(self.passed)]
        self._released_s = now
        ctypes.memmove(self._page.key, key, KEY_BYTES)
        self._page.released = ticket
