"""A turnstile: locked calls are let through one at a time, by keys that the supervisor hands out and a clock that it alone reads.

The inputs of such a call lie locked in the arena, under a key of its own. The supervisor gives a rank the key when the rank has come
to the call, and the next key not before the rank has committed itself to what this call returned, by a digest of it. So what a rank does
with a locked call's contents cannot be done before its key is there, nor put off until the next one is: it passes between the two.

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

from peerlane.evaluate.groups import GroupFailure, RankGroup
from peerlane.evaluate.protocol import Message

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
    """Which calls of a block or pass are locked: position, slot, and ticket of each, and the keys of their slots."""

    calls: tuple[tuple[int, int, int], ...] = ()
    keys: Mapping[int, bytes] = field(default_factory=dict)

    @staticmethod
    def draw(order: Sequence[int], positions: Collection[int], first_ticket: int) -> LockedCalls:
        """The calls at these positions of an order, with new keys; no slot may come twice there."""
        places = sorted(positions)
        calls = tuple((position, order[position], ticket) for ticket, position in enumerate(places, first_ticket))
        return LockedCalls(calls, {slot: secrets.token_bytes(KEY_BYTES) for _, slot, _ in calls})

    @property
    def written_keys(self) -> dict[int, str]:
        """The keys in hexadecimal, for requests to trusted ranks."""
        return {slot: key.hex() for slot, key in self.keys.items()}


NOTHING_LOCKED = LockedCalls()


@dataclass(frozen=True)
class Passage:
    """A locked call that was let through: its position, its slot, and of every rank what it committed itself to, and how long it took from
    the key to that, in microseconds. That holds unlocking, copying the answer and digesting it, besides the call."""

    position: int
    slot: int
    digests: tuple[tuple[int, int], ...]
    ranks_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """Of the slowest rank."""
        return max(self.ranks_us)


def ask_and_let_through(
    group: RankGroup, requests: Message | Sequence[Message], locked: LockedCalls, phase: str, deadline_s: float
) -> tuple[list[Message], list[Passage]]:
    """As :meth:`RankGroup.ask`; meanwhile lets the locked calls through. Raises GroupFailure, also for ranks that answer before that is
    done. Keeps its core busy, for a look late is a call that seems long."""
    if not locked.calls:
        return group.ask(requests, phase, deadline_s), []
    turnstiles = [_Turnstile(Page.of(group.memory_fd(rank)), locked) for rank in range(group.world_size)]
    begin = time.monotonic()
    end, look = begin + deadline_s, begin + _LOOK_S
    group.begin(requests, phase, deadline_s)
    while waiting := {rank for rank, turnstile in enumerate(turnstiles) if not turnstile.turn()}:
        os.sched_yield()
        if (now := time.monotonic()) > look:
            answering = group.answering_ranks  # before turning again: who answers had committed itself before
            if now > end or any(not turnstiles[rank].turn() for rank in waiting & answering):
                break
            look = now + _LOOK_S
    answers = group.finish()
    if any(not turnstile.turn() for turnstile in turnstiles):
        raise GroupFailure("garbage", phase, "a rank answered before all of its locked calls had been let through")
    return answers, [
        Passage(
            position,
            slot,
            tuple(turnstile.digests[number] for turnstile in turnstiles),
            tuple(turnstile.times_us[number] for turnstile in turnstiles),
        )
        for number, (position, slot, _) in enumerate(locked.calls)
    ]


class _Turnstile:
    """One rank's."""

    def __init__(self, page: Page, locked: LockedCalls) -> None:
        self._page, self._locked = page, locked
        self._released_s: float | None = None
        self.digests: list[tuple[int, int]] = []
        self.times_us: list[float] = []

    def turn(self) -> bool:
        """Goes on as far as the rank has; True when all of its calls are through."""
        page, done = self._page, len(self.digests)
        if done == len(self._locked.calls):
            return True
        _, slot, ticket = self._locked.calls[done]
        if self._released_s is None:
            if page.begun >= ticket:
                self._released_s = _clock()
                ctypes.memmove(page.key, self._locked.keys[slot], KEY_BYTES)
                page.released = ticket
        elif page.committed >= ticket:
            self.times_us.append((_clock() - self._released_s) * 1e6)
            self.digests.append((page.digest[0], page.digest[1]))
            self._released_s = None
            return len(self.digests) == len(self._locked.calls)
        return False
