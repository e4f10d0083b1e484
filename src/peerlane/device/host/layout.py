"""Sub-allocation by plain counting: ranks that take the same sizes in the same order get the same offsets."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from peerlane.errors import UsageError

LINE_BYTES = 128


class Layout:
    """Offsets in ``nbytes`` of memory, the first ``reserved`` of which are taken already.

    With ``guard_bytes`` every part begins at a multiple of that, and as many bytes behind it belong to nobody. A guarded layout is longer
    than ``nbytes``, but is full when an ordinary one would be."""

    def __init__(self, nbytes: int, *, reserved: int = 0, guard_bytes: int = 0) -> None:
        self.nbytes = nbytes
        self.taken = reserved
        self.parts: list[tuple[int, int]] = [(0, reserved)] if reserved else []
        """offset and length of everything that is taken"""
        self._guard_bytes = guard_bytes
        self._digest = hashlib.sha256()

    @property
    def takes(self) -> int:
        return len(self.parts)

    def take(self, nbytes: int, *, align: int = LINE_BYTES, name: str = "") -> int:
        """Offset of ``nbytes`` that nobody else has taken. ``name`` is for those who report on memory."""
        if nbytes < 0 or align < 1 or align & (align - 1):
            raise UsageError(f"take({nbytes}, align={align}): expected a size of 0 or more and a power of two")
        offset = -(-self.taken // align) * align
        if offset + nbytes > self.nbytes:
            raise UsageError(
                f"the arena is full: {nbytes} bytes asked for, {max(self.nbytes - offset, 0)} left of {self.nbytes}; create a larger one"
            )
        self.taken = offset + nbytes
        self._digest.update(f"{nbytes}/{align};".encode())
        if self._guard_bytes:
            align = max(align, self._guard_bytes)
            end = sum(self.parts[-1]) if self.parts else 0
            offset = -(-(end + self._guard_bytes) // align) * align
        self.parts.append((offset, nbytes))
        return offset

    def record(self) -> "LayoutRecord":
        """What has been taken so far, in a form that ranks can exchange."""
        return LayoutRecord(self.takes, self.taken, int.from_bytes(self._digest.digest()[:7], "little"))


@dataclass(frozen=True)
class LayoutRecord:
    """Number of takes, bytes taken, and a fingerprint of sizes and order (less than 2**56)."""

    takes: int
    taken: int
    fingerprint: int


def check_layouts(records: Sequence[LayoutRecord]) -> None:
    """Raise UsageError unless every rank has taken the same sizes in the same order."""
    if len(set(records)) <= 1:
        return
    told = ", ".join(f"rank {rank}: {record.takes} of {record.taken} bytes together" for rank, record in enumerate(records))
    raise UsageError(
        f"the ranks have taken different parts of the arena ({told}); sizes and order must be the same on every rank: "
        "offsets would mean different things otherwise. Look for a size that depends on the rank or its data"
    )
