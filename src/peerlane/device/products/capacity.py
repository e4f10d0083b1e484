"""Sizes that share memory in the arena.

What a fused product keeps there has room for a power of two of rows, its capacity, and every size of up to that capacity uses it: so memory
grows by doubling, and no size behind the largest asks for any. Launches of all these sizes follow each other as those of one size do:

* They take their epochs from the same counters, and all ranks launch the same sizes in the same order.
* Slots lie as far apart as the capacity says, whatever the size of a launch. So the two buffers of launches e and e + 1 do not overlap, and
  launch e + 2 may write to the buffer of launch e for the reason that each header gives, which no size is part of.
* A flag may stand for another tile or piece in the next launch. It has one writer, whose launches run one after the other: if it has
  reached epoch e, its writer has stored what it stands for in launch e, or has finished that launch. Numbers are compared within 2^31, so a
  size may not stay away for more launches than that.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from peerlane.device.host.group import Group, is_kept

Memory = TypeVar("Memory")

LEAST_ROWS = 64
"""Smaller sizes take one row of the smallest tiles, as this one does."""


def capacity(rows: int) -> int:
    """How many rows there is room for, where there has to be room for ``rows``: the next power of two."""
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())


MOST_DOUBLINGS = 24


def with_room(make: Callable[..., Memory], group: Group, rows: int, *rest: Any) -> Memory:
    """Returns ``make(group, room, *rest)``, a function of ``per_group``, for the smallest room of at least ``rows`` that the group keeps;
    where it keeps none, for the capacity of ``rows``, which is collective."""
    room = capacity(rows)
    kept = (room << doubling for doubling in range(MOST_DOUBLINGS) if is_kept(make, group, room << doubling, *rest))
    return make(group, next(kept, room), *rest)
