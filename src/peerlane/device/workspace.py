"""The memory of the collectives, and what they move: host side of ``collectives/workspace.cuh``."""

from __future__ import annotations

import ctypes
from typing import Protocol

from peerlane.device.arena import MAX_RANKS
from peerlane.device.layout import LINE_BYTES

# Mirrored from the headers.
MAX_EPOCH_BLOCKS = 256
PACKET_BYTES, PACKET_DATA_BYTES = 16, 12
RING_DEPTH, RING_TILE_BYTES = 4, 16384
STAGES_PER_SENDER, WARPS_PER_RECEIVER, WARP_THREADS = 2, 2, 32

RELAY_BLOCKS = 128
CHANNELS_IN_FLIGHT = 128
"""Bulk stores of one tile each that a rank has on the way at a time: 2 MiB, or 5 us of a port of 400 GB/s."""
PACKET_LIMIT_BYTES = 4 << 20
"""Largest tensor that is reduced as packets, which carry a third more bytes than data; beyond it the ring's signals cost less."""


class Taker(Protocol):
    """What gives parts of an arena away."""

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int: ...


class Channels(ctypes.Structure):
    """Mirrors ``peerlane::Channels``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("tiles", "flags", "counters", "blocks"))

    @classmethod
    def take(cls, arena: Taker, world_size: int, blocks: int) -> Channels:
        pairs = blocks * world_size
        return cls(
            tiles=arena.take(pairs * RING_DEPTH * RING_TILE_BYTES),
            flags=arena.take(2 * pairs * LINE_BYTES),
            counters=arena.take(2 * pairs * 4),
            blocks=blocks,
        )


class Workspace(ctypes.Structure):
    """Where the collectives' memory lies in an arena. Mirrors ``peerlane::CollectiveWorkspace``."""

    _fields_ = (
        ("epochs", ctypes.c_uint64),
        ("packets", ctypes.c_uint64),
        ("packet_buffer_bytes", ctypes.c_uint64),
        ("relay_tiles", ctypes.c_uint64),
        ("relay_flags", ctypes.c_uint64),
        ("relay_numbers", ctypes.c_uint64),
        ("relay_blocks", ctypes.c_uint64),
        ("copies", Channels),
        ("sums", Channels),
    )

    @classmethod
    def take(cls, arena: Taker, world_size: int) -> Workspace:
        """Take ``workspace_bytes(world_size)`` of an arena."""
        packet_bytes = packet_buffer_bytes(world_size)
        relay_pairs = RELAY_BLOCKS * world_size
        return cls(
            epochs=arena.take(4 * MAX_EPOCH_BLOCKS),
            packets=arena.take(2 * packet_bytes),
            packet_buffer_bytes=packet_bytes,
            relay_tiles=arena.take(relay_pairs * 2 * RING_DEPTH * RING_TILE_BYTES),
            relay_flags=arena.take(relay_pairs * LINE_BYTES),
            relay_numbers=arena.take(4 * RELAY_BLOCKS),
            relay_blocks=RELAY_BLOCKS,
            copies=Channels.take(arena, world_size, exchange_blocks(world_size)),
            sums=Channels.take(arena, world_size, exchange_blocks(world_size)),
        )


class Messages(ctypes.Structure):
    """What a rank sends to and gets from every rank of its group. Mirrors ``peerlane::Messages``; bytes."""

    _fields_ = tuple((name, ctypes.c_uint64 * MAX_RANKS) for name in ("send_at", "send_bytes", "receive_at", "receive_bytes"))


def workspace_bytes(world_size: int) -> int:
    """Bytes of an arena that hold a workspace."""
    counter = _Counter()
    Workspace.take(counter, world_size)
    return counter.taken


def packet_buffer_bytes(world_size: int) -> int:
    """Two shots of the largest tensor: a place for every rank's term and sum of each share."""
    packets = -(-PACKET_LIMIT_BYTES // PACKET_DATA_BYTES)
    return 2 * world_size * -(-packets // world_size) * PACKET_BYTES


def packet_message_bytes(world_size: int) -> int:
    """Largest message of an exchange by packets: a packet buffer is cut into one part per source."""
    return packet_buffer_bytes(world_size) // world_size // PACKET_BYTES * PACKET_DATA_BYTES


def exchange_blocks(world_size: int) -> int:
    """Blocks of an exchange by rings; a block has a channel to every other rank."""
    return -(-CHANNELS_IN_FLIGHT // (world_size - 1))


def exchange_threads(world_size: int) -> int:
    """Threads of such a block: a sending warp per peer, receiving warps per rank."""
    return WARP_THREADS * (world_size - 1 + world_size * WARPS_PER_RECEIVER)


def exchange_shared_bytes(world_size: int) -> int:
    """Dynamic shared memory of such a block."""
    return (world_size - 1) * STAGES_PER_SENDER * RING_TILE_BYTES


class _Counter:
    """Counts what would be taken, alignment included."""

    taken = 0

    def take(self, nbytes: int, *, align: int = LINE_BYTES) -> int:
        offset = -(-self.taken // align) * align
        self.taken = offset + nbytes
        return offset
