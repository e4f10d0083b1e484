"""Who of a group's ranks is still there: one thread of a process for each of its groups.

Every second it leaves a sign of life in the group's store and looks for those of the others. On one machine it also looks whether their
processes exist: that finds a death at once, and never mistakes a slow process for a dead one. A rank that has died can send nothing more,
so all waits of the group are ended. So they are when another rank says that its waits have ended. A rank that has destroyed the group has
left it, which is no death.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlane.device.host.waits import Waits

PERIOD_S = 1.0
SILENCE_S = 60.0
"""without a sign of life, after which a rank counts as dead whose process can not be looked for"""
GRACE_S = 2.0
"""between a death and the end of the waits: what the rank had sent may still be on its way to somebody's kernel, or it may be the end of
the program everywhere"""
TOLD_S = 2.0
"""for which a rank waits for another one's words, once it has heard that waits have ended"""
_ENDED = "watch/ended"


@dataclass(frozen=True)
class Life:
    """A process as others can look for it."""

    pid: int
    started: str
    """when, in the kernel's words: numbers of processes come again"""
    space: str
    """the namespace of its number; empty if it is not known"""

    @classmethod
    def own(cls) -> "Life":
        """This process."""
        space = ""
        with contextlib.suppress(OSError):
            space = os.readlink("/proc/self/ns/pid")
        return cls(os.getpid(), _started(os.getpid()), space)

    def ended(self, space: str) -> bool | None:
        """Whether the process is gone; None where it can not be looked for from the namespace ``space``."""
        if not self.space or self.space != space:
            return None
        return _started(self.pid) != self.started


def _started(pid: int) -> str:
    """When a process was started; empty if there is none, or only what its parent has not buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Watch:
    """The watch over one group, on one of its ranks. ``lives`` has every rank's.

    ``left``: bytes that the ranks share, if they do, where each says that it has left. ``destroyed`` tells whether this rank has. ``limit``
    gives the group's time limit in seconds, as its owner has set it since; None leaves it alone."""

    def __init__(
        self,
        store: Any,
        rank: int,
        lives: Sequence[Life],
        waits: Waits,
        *,
        left: memoryview | None = None,
        destroyed: Callable[[], bool] = lambda: False,
        limit: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._store, self._rank, self._lives, self._waits = _own_connection(store), rank, lives, waits
        self._left, self._destroyed, self._limit = left, destroyed, limit
        self._ending, self._stopped = threading.Event(), False
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._count = 0
        self._silent: dict[int, float] = {}
        waits.told, waits.tell = self._told, self._tell
        self._beat()
        self._thread = threading.Thread(target=self._run, name=f"peerlane watch of rank {rank}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """This rank has no more to do with the group: whatever becomes of it is no death."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._left is not None:
            self._left[self._rank] = 1
        with contextlib.suppress(Exception):  # the store may be gone
            self._store.set(f"watch/left/{self._rank}", "1")

    def _run(self) -> None:
        while not self._ending.wait(PERIOD_S):
            if self._destroyed():
                self.leave()
                return
            if (limit := self._limit()) is not None and limit != self._waits.limit_s:
                with contextlib.suppress(Exception):
                    self._waits.set_limit(limit)
            heard = self._talk()
            if self._waits.stopped:
                continue
            now = time.monotonic()
            for rank in range(len(self._lives)):
                if rank == self._rank or self._has_left(rank):
                    continue
                if reason := self._death(rank, now, heard):
                    self._waits.stop(f"{reason}: rank {self._rank} can wait for it no more")
                    break

    def _talk(self) -> bool:
        """Exchange news by the store; returns whether it was there."""
        try:
            self._beat()
            if self._waits.stopped and not self._stopped:
                if known := self._waits.known():
                    self._tell(known)
            elif not self._waits.stopped and self._store.check([_ENDED]):
                self._waits.stop(self._told())
            keys = [f"watch/beat/{rank}" for rank in range(len(self._lives)) if rank != self._rank]
            if self._store.check(keys):
                now = time.monotonic()
                for rank in range(len(self._lives)):
                    if rank != self._rank:
                        beat = self._store.get(f"watch/beat/{rank}")
                        if rank not in self._beats or self._beats[rank][0] != beat:
                            self._beats[rank] = beat, now
        except Exception:  # the process that holds the store has ended, or is about to
            return False
        return True

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"watch/beat/{self._rank}", str(self._count))

    def _death(self, rank: int, now: float, heard: bool) -> str:
        """What to say if a rank has been dead for a while."""
        life, own = self._lives[rank], self._lives[self._rank]
        ended = life.ended(own.space)
        if ended is None:
            since = self._beats[rank][1] if rank in self._beats else None
            if since is not None and now - since > SILENCE_S:
                also = "" if heard else ", nor did the store"
                return f"rank {rank} (process {life.pid}) gave no sign of life for {now - since:.0f} s{also}"
            return ""
        if not ended:
            self._silent.pop(rank, None)
            return ""
        return f"rank {rank} (process {life.pid}) has died" if now - self._silent.setdefault(rank, now) >= GRACE_S else ""

    def _has_left(self, rank: int) -> bool:
        if self._left is not None:
            return bool(self._left[rank])
        try:
            return bool(self._store.check([f"watch/left/{rank}"]))
        except Exception:
            return False

    def _tell(self, reason: str) -> None:
        """The first to tell is heard."""
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(Exception):
                self._store.compare_set(_ENDED, "", reason)

    def _told(self) -> str:
        with contextlib.suppress(Exception):
            end = time.monotonic() + TOLD_S
            while not self._store.check([_ENDED]) and time.monotonic() < end:
                time.sleep(0.1)
            if self._store.check([_ENDED]):
                return str(self._store.get(_ENDED).decode())
        # The store has gone, or nobody has come to tell: what is there to be seen from here?
        space = self._lives[self._rank].space
        dead = [f"rank {rank} (process {life.pid}) has died" for rank, life in enumerate(self._lives) if life.ended(space)]
        return "; ".join(dead)


def _own_connection(store: Any) -> Any:
    """The same store by a connection of its own, where there are such: a wait of one thread does not hold up the others."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
