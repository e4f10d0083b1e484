"""Messages between two ranks on the kit: host side of ``collectives/point_to_point.cuh``, which says how they are matched.

They take no part in the lane of collectives: a message may wait for a rank that has a collective to do first.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from peerlane.device.collectives.workspace import Taker
from peerlane.device.host.arena import Arena, ArenaView
from peerlane.device.host.group import DeviceLaunch, Group, per_group
from peerlane.device.host.launch import excuse
from peerlane.device.host.layout import LINE_BYTES

SOURCE = """
#include <peerlane/collectives/point_to_point.cuh>
using namespace peerlane;
extern "C" __global__ void __launch_bounds__(256) point_to_point(
    const __grid_constant__ Arena arena, const __grid_constant__ MessageSpace space, const __grid_constant__ Transfers transfers) {
    move_messages(arena, space, transfers);
}
"""
THREADS = 256
MOST_TRANSFERS = 64
"""The most transfers of one launch; mirrors ``peerlane::most_transfers``"""
_TRANSFERS = 2  # the place of the argument


@dataclass(frozen=True)
class Slots:
    """The slots for the messages from each source; the same on all ranks."""

    count: int = 64
    tile_bytes: int = 64 << 10
    parts: int = 4
    """Blocks that carry a message, at most: few, because those of all messages under way have to be resident together."""

    def defines(self) -> dict[str, str | int]:
        """Returns the macro that the header wants: ``peerlane::MessageSlots``, in its order."""
        return {"PEERLANE_MESSAGES": f"{self.count},{self.tile_bytes},{self.parts}"}

    def blocks(self, nbytes: int) -> int:
        """Returns how many blocks carry a message of so many bytes."""
        return min(max(1, -(-nbytes // self.tile_bytes)), self.parts)


class Space(ctypes.Structure):
    """The place of the slots in an arena. Mirrors ``peerlane::MessageSpace``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("tiles", "posts", "owners", "tickets"))

    @classmethod
    def take(cls, arena: Taker, world_size: int, slots: Slots) -> "Space":
        """Takes ``space_bytes`` of an arena."""
        each = world_size * slots.count
        return cls(*(arena.take(nbytes) for nbytes in (each * slots.tile_bytes, each * LINE_BYTES, each * LINE_BYTES, 4 * world_size)))


def space_bytes(world_size: int, slots: Slots) -> int:
    """Returns the bytes of an arena that hold the slots."""
    return world_size * slots.count * (slots.tile_bytes + 2 * LINE_BYTES) + 5 * LINE_BYTES


@dataclass(frozen=True)
class Transfer:
    """A send or a receive of ``nbytes`` at ``address``, to or from rank ``peer``. ``label`` is the same at both ends of a message."""

    address: int
    nbytes: int
    peer: int
    receives: bool
    label: str

    @property
    def key(self) -> tuple[int, int]:
        """Returns what the other end knows the message by: a digest of the label and the size."""
        digest = hashlib.blake2b(f"{self.nbytes} {self.label}".encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class _Row(ctypes.Structure):
    """One transfer as the kernel gets it. Mirrors ``peerlane::Transfer``."""

    _fields_ = (
        ("at", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("key", ctypes.c_uint32 * 2),
        *((name, ctypes.c_uint32) for name in ("peer", "receives", "first_block", "next")),
    )


class Table(ctypes.Structure):
    """The transfers of one launch. Mirrors ``peerlane::Transfers``."""

    _fields_ = (("list", _Row * MOST_TRANSFERS), ("count", ctypes.c_uint32))


def table(transfers: Sequence[Transfer], slots: Slots) -> tuple[Table, int]:
    """Returns the table of a launch and the number of its blocks.

    Blocks that send come first. Transfers with one peer and key follow each other in the blocks of the first of them."""
    rows = Table(count=len(transfers))
    last: dict[tuple[int, bool, tuple[int, int]], int] = {}
    blocks = 0
    for index, transfer in enumerate(sorted(transfers, key=lambda transfer: transfer.receives)):
        key = transfer.key
        row = rows.list[index]
        row.at, row.bytes, row.key[0], row.key[1] = transfer.address, transfer.nbytes, *key
        row.peer, row.receives = transfer.peer, transfer.receives
        same = (transfer.peer, transfer.receives, key)
        if same in last:
            rows.list[last[same]].next, row.first_block = index, 0xFFFFFFFF
        else:
            row.first_block = blocks
            blocks += slots.blocks(transfer.nbytes)
        last[same] = index
    return rows, blocks


class PointToPoint:
    """The messages between the ranks of one group, which all see each other's memory. Creating one is collective; nothing else is."""

    def __init__(self, group: Group, slots: Slots = Slots()) -> None:
        self.group, self.slots = group, slots
        self.arena = Arena(space_bytes(group.world_size, slots), group, name="messages")
        self._space = Space.take(self.arena, group.world_size, slots)
        self.arena.seal()
        self._view = ArenaView.from_buffer_copy(self.arena.view)  # without the group, whose lane takes launches that belong to it
        self._kernel = group.kernel(SOURCE, "point_to_point", defines=slots.defines(), on_failure=self.arena.raise_fault)
        excuse(self._kernel)
        self._launches: dict[int, DeviceLaunch] = {}

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Starts at most ``MOST_TRANSFERS`` sends and receives on the current stream. Does not wait for them.

        Those of one label and peer must run in the order of their calls, here and at the other end."""
        rows, blocks = table(transfers, self.slots)
        with self.group.lock:
            if blocks not in self._launches:
                self._launches[blocks] = self._kernel.bind(blocks, THREADS, (self._view, self._space, Table()))
            launch = self._launches[blocks]
            ctypes.memmove(ctypes.addressof(launch.args[_TRANSFERS]), ctypes.addressof(rows), ctypes.sizeof(rows))
            launch()


@per_group
def point_to_point(group: Group) -> PointToPoint:
    """Returns the messages of ``group`` in this process, made by the first call, which is collective."""
    return PointToPoint(group)
