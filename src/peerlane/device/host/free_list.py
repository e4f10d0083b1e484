"""Which parts of a range of memory are free: first fit, and neighbours that are both free become one."""

from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """The free parts of ``nbytes``, which may grow at the end. Ranks that take and give back in one order find the same offsets."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.touched = 0
        """Bytes below this offset have been taken before, and may be anything but zero."""
        self._parts: list[tuple[int, int]] = []
        """offset and length of what is free, by offset; no two of them touch"""

    @property
    def free(self) -> int:
        """Bytes that are free, in all parts together."""
        return sum(length for _, length in self._parts)

    @property
    def tail(self) -> int:
        """Bytes that are free at the end: those that are added now join them."""
        return self._parts[-1][1] if self._parts and sum(self._parts[-1]) == self.nbytes else 0

    def grow(self, nbytes: int) -> None:
        """Add free bytes at the end."""
        self.nbytes += nbytes
        self.give(self.nbytes - nbytes, nbytes)

    def fit(self, nbytes: int) -> int | None:
        """The first offset at which as many bytes are free; None if there is none."""
        return next((offset for offset, length in self._parts if length >= nbytes), None)

    def take(self, offset: int, nbytes: int) -> None:
        """Take bytes at an offset that ``fit`` gave."""
        at = bisect_left(self._parts, (offset, 0))
        _, length = self._parts[at]
        self._parts[at : at + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        self.touched = max(self.touched, offset + nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Make bytes free that were taken."""
        at = bisect_left(self._parts, (offset, 0))
        begin, end = offset, offset + nbytes
        first, last = at, at
        if at > 0 and sum(self._parts[at - 1]) == begin:
            first, begin = at - 1, self._parts[at - 1][0]
        if at < len(self._parts) and self._parts[at][0] == end:
            last, end = at + 1, sum(self._parts[at])
        self._parts[first:last] = [(begin, end - begin)]
