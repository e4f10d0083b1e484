"""Host side of ``peerlane/all_reduce.cuh``: the workspace in an arena, and which of the three kernels to use for a size."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch

from peerlane.device.arena import LINE_BYTES, Arena

ELEMENT_TYPES = {torch.bfloat16: "peerlane::BFloat16", torch.float16: "peerlane::Float16", torch.float32: "peerlane::Float32"}
"""The C++ element type of each supported dtype."""

# Mirrored from comm.cuh and all_reduce.cuh.
_MAX_EPOCH_BLOCKS = 256
_PACKET_BYTES, _PACKET_DATA_BYTES = 16, 12
_RING_DEPTH, _TILE_BYTES = 4, 16384

PACKET_LIMIT_BYTES = 4 << 20
"""Largest tensor sent as packets, which carry a third more bytes than data; beyond it the ring's signals cost less."""
ONE_SHOT_EXCESS_BYTES = 512 << 10
"""Bytes per port that a second trip over the link is worth: about 1.5 us at 343 GB/s."""
RING_BLOCKS = 128


class Workspace(ctypes.Structure):
    """Where the workspace lies in the arena. Mirrors ``peerlane::AllReduceWorkspace``."""

    _fields_ = (
        ("epochs", ctypes.c_uint64),
        ("packets", ctypes.c_uint64),
        ("packet_buffer_bytes", ctypes.c_uint64),
        ("ring", ctypes.c_uint64),
        ("ring_flags", ctypes.c_uint64),
        ("ring_numbers", ctypes.c_uint64),
        ("ring_blocks", ctypes.c_uint64),
    )

    @classmethod
    def take(cls, arena: Arena) -> Workspace:
        """Take ``workspace_bytes(arena.world_size)`` of the arena."""
        packet_bytes, ring_bytes, flag_bytes = _sizes(arena.world_size)
        return cls(
            epochs=arena.take(4 * _MAX_EPOCH_BLOCKS),
            packets=arena.take(2 * packet_bytes),
            packet_buffer_bytes=packet_bytes,
            ring=arena.take(ring_bytes),
            ring_flags=arena.take(flag_bytes),
            ring_numbers=arena.take(4 * RING_BLOCKS),
            ring_blocks=RING_BLOCKS,
        )


def workspace_bytes(world_size: int) -> int:
    packet_bytes, ring_bytes, flag_bytes = _sizes(world_size)
    return 2 * packet_bytes + ring_bytes + flag_bytes + 4 * (_MAX_EPOCH_BLOCKS + RING_BLOCKS) + 5 * LINE_BYTES


def _sizes(world_size: int) -> tuple[int, int, int]:
    """Bytes of one packet buffer, of the ring's tiles and of its flags."""
    packets = -(-PACKET_LIMIT_BYTES // _PACKET_DATA_BYTES)
    share = -(-packets // world_size)
    pairs = RING_BLOCKS * world_size
    return 2 * world_size * share * _PACKET_BYTES, pairs * 2 * _RING_DEPTH * _TILE_BYTES, pairs * LINE_BYTES


@dataclass(frozen=True)
class Plan:
    """One launch: the function of ``all_reduce.cuh``, its grid and block."""

    kernel: Literal["one_shot", "two_shot", "two_shot_ring"]
    grid: int
    block: int


def plan(nbytes: int, world_size: int, sm_count: int) -> Plan:
    """The kernel for a tensor of ``nbytes`` > 0. Depends on nothing else, so all ranks plan alike."""
    if nbytes <= PACKET_LIMIT_BYTES:
        packets = -(-nbytes // _PACKET_DATA_BYTES)
        # Per port, one shot sends (W - 1) S and two shots 2 (W - 1) / W S, each times 4 / 3.
        excess = (world_size - 1) * (1 - 2 / world_size) * packets * _PACKET_BYTES
        if excess <= ONE_SHOT_EXCESS_BYTES:
            return Plan("one_shot", *_spread(packets, sm_count))
        return Plan("two_shot", *_spread(-(-packets // world_size), sm_count))
    return Plan("two_shot_ring", min(RING_BLOCKS, sm_count), 512)


def _spread(items: int, sm_count: int) -> tuple[int, int]:
    """Grid and block for ``items`` threads' work: small blocks on many SMs, at most one block per SM."""
    block = next((threads for threads in (128, 256, 512) if items <= threads * sm_count), 512)
    return min(-(-items // block), sm_count), block
