"""The memory of the collectives, and what they move: host side of ``collectives/workspace.cuh``."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

from peerlane.device.host.group import MAX_RANKS
from peerlane.device.host.layout import LINE_BYTES
from peerlane.errors import UsageError

# Mirrored from the headers.
MAX_EPOCH_BLOCKS = 256
PACKET_BYTES, PACKET_DATA_BYTES = 16, 12
WARP_THREADS = 32

PACKET_BUFFER_TENSOR_BYTES = 4 << 20
"""Largest tensor that a packet buffer holds at once, the terms of an all-reduce and its sums; what is longer goes in several rounds."""


@dataclass(frozen=True)
class Rings:
    """The sizes of the rings of tiles through which large messages go; the same on all ranks. Headers get these numbers as a macro and have
    none of their own.

    A port of 375 GB/s needs about 1 MB on its way to be full: tiles times ``in_flight`` times blocks. ``tests/gpu/tune_rings.py`` times
    other settings; between two H200 these were the fastest or within 5 % of it for every operation from 64 MiB on.
    """

    tile_bytes: int = 32 << 10
    depth: int = 16
    """Places per ring. At least ``stages + 2``, or sender and receiver can lock each other; a power of two."""
    stages: int = 2
    """Tiles of shared memory of a warp that moves tiles; ``in_flight`` of them are on their way out, the others on their way in."""
    in_flight: int = 1
    summing_warps: int = 8
    blocks: int = 132
    """Most blocks of an exchange; a block has a channel to every other rank. As many as an H200 has SMs."""
    bytes_per_kind: int = 200 << 20
    """Most memory of all rings that copy; those that sum have as much. At 4 ranks it holds the rings of 132 blocks, at 8 ranks of 57."""

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that break the rules of the headers, which say why."""
        rules = {
            "depth is a power of two": (self.depth > 0 and self.depth & (self.depth - 1) == 0),
            "depth is at least stages + 2": self.depth >= self.stages + 2,
            "tile_bytes is a multiple of 128": self.tile_bytes > 0 and self.tile_bytes % 128 == 0,
            "in_flight is at least 1 and less than stages": 0 < self.in_flight < self.stages,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise UsageError(f"{self} can not be: expected that {', and that '.join(broken)}")

    def defines(self) -> dict[str, str | int]:
        """Returns the macro that the headers want: ``peerlane::RingSettings``, in its order."""
        numbers = (self.tile_bytes, self.depth, self.stages, self.in_flight, self.summing_warps)
        return {"PEERLANE_RINGS": ",".join(map(str, numbers))}

    def exchange_blocks(self, world_size: int) -> int:
        return max(1, min(self.blocks, self.bytes_per_kind // ((world_size - 1) * self.depth * self.tile_bytes)))

    @property
    def exchange_threads(self) -> int:
        """A warp that sends, one that receives, one that copies the rank's own message and one that tells the others how far they are."""
        return 4 * WARP_THREADS

    @property
    def exchange_shared_bytes(self) -> int:
        return 3 * self.stages * self.tile_bytes

    @property
    def reduce_threads(self) -> int:
        """A warp that sends, those that add, and the one that tells."""
        return (2 + self.summing_warps) * WARP_THREADS

    @property
    def reduce_shared_bytes(self) -> int:
        return self.stages * self.tile_bytes

    @property
    def relay_threads(self) -> int:
        """A warp that sends, one that receives, those that add, and the one that tells."""
        return (3 + self.summing_warps) * WARP_THREADS

    @property
    def relay_shared_bytes(self) -> int:
        return (2 * self.stages + self.in_flight + 1) * self.tile_bytes

    @property
    def broadcast_threads(self) -> int:
        """A warp that sends or passes on, one that receives, and the one that tells."""
        return 3 * WARP_THREADS

    @property
    def broadcast_shared_bytes(self) -> int:
        return 2 * self.stages * self.tile_bytes


RINGS = Rings()
"""The default."""


class Taker(Protocol):
    """An object that gives parts of an arena away."""

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int: ...


class Channels(ctypes.Structure):
    """The channels of a ring. Mirrors ``peerlane::Channels``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("tiles", "flags", "counters", "blocks"))

    @classmethod
    def take(cls, arena: Taker, world_size: int, rings: Rings) -> "Channels":
        blocks = rings.exchange_blocks(world_size)
        pairs = blocks * world_size
        return cls(
            tiles=arena.take(blocks * (world_size - 1) * rings.depth * rings.tile_bytes),
            flags=arena.take(2 * pairs * LINE_BYTES),
            counters=arena.take(2 * pairs * 4),
            blocks=blocks,
        )


class Workspace(ctypes.Structure):
    """The place of the collectives' memory in an arena. Mirrors ``peerlane::CollectiveWorkspace``."""

    _fields_ = (
        ("epochs", ctypes.c_uint64),
        ("packets", ctypes.c_uint64),
        ("packet_buffer_bytes", ctypes.c_uint64),
        ("copies", Channels),
        ("sums", Channels),
        ("factor", ctypes.c_float),
    )

    @classmethod
    def take(cls, arena: Taker, world_size: int, rings: Rings = RINGS) -> "Workspace":
        """Takes ``workspace_bytes(world_size, rings)`` of an arena."""
        packet_bytes = packet_buffer_bytes(world_size)
        return cls(
            epochs=arena.take(4 * MAX_EPOCH_BLOCKS),
            packets=arena.take(2 * packet_bytes),
            packet_buffer_bytes=packet_bytes,
            copies=Channels.take(arena, world_size, rings),
            sums=Channels.take(arena, world_size, rings),
        )

    @classmethod
    def take_staged(cls, arena: Taker, world_size: int, nbytes: int, blocks: int) -> "Workspace":
        """Takes ``staged_bytes`` of an arena: what a staged all-reduce of up to ``nbytes`` by so many blocks uses of a workspace."""
        vectors = -(-nbytes // 16)

        def channels(vectors: int) -> Channels:
            return Channels(tiles=arena.take(16 * vectors), flags=arena.take(blocks * world_size * LINE_BYTES), counters=0, blocks=blocks)

        shares = world_size * -(-vectors // world_size)
        epochs, copies, sums = arena.take(4 * MAX_EPOCH_BLOCKS), channels(shares), channels(shares)
        return cls(epochs=epochs, packets=0, packet_buffer_bytes=0, copies=copies, sums=sums)


class Messages(ctypes.Structure):
    """The messages between a rank and every rank of its group. Mirrors ``peerlane::Messages``; bytes."""

    _fields_ = tuple((name, ctypes.c_uint64 * MAX_RANKS) for name in ("send_at", "send_bytes", "receive_at", "receive_bytes"))


def workspace_bytes(world_size: int, rings: Rings = RINGS) -> int:
    """Returns the bytes of an arena that hold a workspace."""
    counter = _Counter()
    Workspace.take(counter, world_size, rings)
    return counter.taken


def staged_bytes(world_size: int, nbytes: int, blocks: int) -> int:
    """Returns the bytes of an arena for staged all-reduces of up to ``nbytes``."""
    counter = _Counter()
    Workspace.take_staged(counter, world_size, nbytes, blocks)
    return counter.taken


def packet_buffer_bytes(world_size: int) -> int:
    """Returns the bytes of two shots of the largest tensor: a place for every rank's term and sum of each share."""
    packets = -(-PACKET_BUFFER_TENSOR_BYTES // PACKET_DATA_BYTES)
    return 2 * world_size * -(-packets // world_size) * PACKET_BYTES


def packet_message_bytes(world_size: int) -> int:
    """Returns the largest message that goes by packets in one round: a packet buffer is cut into one part per source."""
    return packet_buffer_bytes(world_size) // world_size // PACKET_BYTES * PACKET_DATA_BYTES


class _Counter:
    """A counter of what would be taken, alignment included."""

    taken = 0

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        offset = -(-self.taken // align) * align
        self.taken = offset + nbytes
        return offset
