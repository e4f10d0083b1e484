"""The cache of a group: one entry for each function of ``per_group`` and its arguments. The least recently used entry is evicted first.

An entry is collective if making it took an exchange with the other ranks, as memory in an arena does. All ranks evict such an entry
together, because all are needed to make it again. When another collective entry asks for its first memory, each rank lists the entries that
it can evict, the least recently used first. The first one that is on all lists is evicted. Each rank evicts other entries by itself.

An entry stays while another entry that was made with it needs it. It stays for ever if it is the only one of its function, or if it was
used while a CUDA graph was captured, because a replay reads its memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

MOST_COLLECTIVE = 128
MOST_LOCAL = 2048
"""The most entries that are kept. Local ones are small: a launch, its tensor maps, sometimes a workspace."""

_clock = itertools.count(1)


class Evictable(Protocol):
    """Memory that goes with its entry."""

    def evict(self) -> None: ...

    def close(self) -> None: ...


class Entry:
    """A cached value, and the entries that it needs and that need it."""

    def __init__(self, home: GroupCache, key: Hashable, *, stays: bool) -> None:
        self.home, self.key, self.stays = home, key, stays
        self.value: Any = None
        self.used = 0
        """A number that grows with every use of the cache: the smallest was used longest ago."""
        self.number: int | None = None
        """The number of a collective entry in its group, the same on every rank; None for other entries."""
        self.in_making, self.collective = True, False
        self.arenas: list[Evictable] = []
        self.needs: set[Entry] = set()
        self.needed_by: set[Entry] = set()

    def above(self) -> Iterator[Entry]:
        """This entry, and all that were made with it, directly or not."""
        yield self
        for entry in self.needed_by:
            yield from entry.above()


class _Making(threading.local):
    """The entries that this thread is making, the innermost last."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []


_making = _Making()


class GroupCache:
    """The entries of one group, on one of its ranks."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, Entry] = {}
        self.captures: Callable[[], bool] = lambda: False
        """Returns whether a CUDA graph is being captured."""
        self._numbers = itertools.count()

    def get(self, key: Hashable, make: Callable[[], Any], *, stays: bool = False) -> Any:
        """Returns the value of this key; ``make`` makes it if there is none. ``stays``: it is never evicted."""
        return self.use(self.entries.get(key) or self.make(key, make, stays=stays))

    def use(self, entry: Entry) -> Any:
        """Returns the entry's value, and counts the use."""
        entry.used = next(_clock)
        if self.captures():
            entry.stays = True
        if _making.entries:
            above = _making.entries[-1]
            above.needs.add(entry)
            entry.needed_by.add(above)
        return entry.value

    def make(self, key: Hashable, make: Callable[[], Any], *, stays: bool) -> Entry:
        """Makes the entry of a key that has none."""
        entry = Entry(self, key, stays=stays)
        _making.entries.append(entry)
        try:
            entry.value = make()
        except BaseException:
            self._remove(entry)
            raise
        finally:
            _making.entries.pop()
        entry.in_making = False
        if entry.collective:
            entry.number = next(self._numbers)
        else:
            self._drop_local()
        self.entries[key] = entry
        return entry

    def exchanged(self) -> None:
        """Marks the entry in the making, if there is one, as collective: the ranks of this group have exchanged something for it."""
        if _making.entries:
            entry = _making.entries[-1]
            entry.collective = True
            entry.stays = entry.stays or entry.home is not self  # the two groups may have different ranks

    def own(self, arena: Evictable) -> Entry | None:
        """Gives an arena of this group to the entry in the making, and returns that entry; None if there is none."""
        if not _making.entries:
            return None
        self.exchanged()
        _making.entries[-1].arenas.append(arena)
        return _making.entries[-1]

    def make_room(self, exchange: Callable[[list[int]], list[list[int]]]) -> None:
        """Evicts an entry if there are too many. Collective, before the entry in the making gets its first arena."""
        if not _making.entries or _making.entries[-1].home is not self or _making.entries[-1].arenas:
            return
        while len(collective := {entry.number: entry for entry in self.entries.values() if entry.number is not None}) >= MOST_COLLECTIVE:
            first, *others = exchange(_evictable(list(collective.values())))
            number = next((number for number in first if all(number in other for other in others)), None)
            if number is None:
                return
            for entry in list(collective[number].above()):
                entry.home._remove(entry)

    def clear(self) -> None:
        """Removes all entries, also those that stay for ever, and closes their arenas. No kernel of any rank may use them."""
        for entry in list(self.entries.values()):
            for arena in entry.arenas:
                arena.close()
            self._remove(entry)

    def _drop_local(self) -> None:
        """Evicts the least recently used of the rank's own entries, if there are too many."""
        local = [entry for entry in self.entries.values() if entry.number is None]
        if len(local) >= MOST_LOCAL:
            unneeded = [entry for entry in local if not entry.stays and not entry.needed_by]
            if unneeded:
                self._remove(min(unneeded, key=lambda entry: entry.used))

    def _remove(self, entry: Entry) -> None:
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        for other in entry.needs:
            other.needed_by.discard(entry)
        for other in entry.needed_by:
            other.needs.discard(entry)
        for arena in entry.arenas:
            arena.evict()


def _evictable(entries: list[Entry]) -> list[int]:
    """Returns the numbers of the entries that this rank can evict, the least recently used first."""
    evictable = []
    for entry in entries:
        above = list(entry.above())
        rest = above[1:]
        if not any(other.stays or other.in_making for other in above) and all(other.number is None for other in rest):
            evictable.append((max(other.used for other in above), entry.number))
    return [number for _, number in sorted(evictable) if number is not None]
