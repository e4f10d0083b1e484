"""How left operands are gathered: in which pieces, where they lie in the arena, and which launch uses them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from peerlane.device.host.declare import Reserved
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.device.products import gemm
from peerlane.device.products.gemm import ELEMENT_BYTES, GroupedTiles, Tiling

_SENT_BYTES, _PIECE_BYTES = 48 << 10, 32 << 10
"""What one signal speaks for at most: of a warp, what it stores at all ranks, and of a communicator block. A dozen us of stores, so that a
signal costs little and pieces do not come late."""
_SHORT_PIECE_BYTES = 4 << 10
"""What pieces are not cut below to have one for every sender."""
_PIECE_COLUMNS, _COLUMN_PIECES = 256, 4
"""Columns are cut into as many pieces, none of them narrower than this: rows of 512 bytes are what a warp stores at a time."""


@dataclass(frozen=True)
class Pieces:
    """Shards of (m, local_k) in pieces of (rows, columns), of which each has a signal."""

    m: int
    local_k: int
    rows: int
    columns: int

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.m // self.rows), -(-self.local_k // self.columns)

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * ELEMENT_BYTES


def choose_pieces(m: int, local_k: int, world_size: int, communicator_blocks: int = 0) -> Pieces:
    """Pieces of enough bytes to make a signal cheap, but some for all senders. Rows divide those of every tiling's blocks; communicator
    blocks send whole rows."""
    senders, limit, columns = communicator_blocks, _PIECE_BYTES, local_k
    if not communicator_blocks:
        senders, limit = gemm.TYPICAL_SM_COUNT, _SENT_BYTES // max(1, world_size - 1)
        columns = min(local_k, max(_PIECE_COLUMNS, -(-local_k // (_COLUMN_PIECES * gemm.PANEL)) * gemm.PANEL))
    pieces = Pieces(m, local_k, 64, columns)
    while pieces.rows > 1 and (pieces.nbytes > limit or (pieces.count < senders and pieces.nbytes > _SHORT_PIECE_BYTES)):
        pieces = replace(pieces, rows=pieces.rows // 2)
    return pieces


def most_pieces(m: int, local_k: int, world_size: int, communicator_blocks: int = 0) -> int:
    """How many pieces shards of up to ``m`` rows have at most. Smaller ones may have more than that of ``m``: rows of a piece are halved
    while there are fewer pieces than senders, which gives less than two for each."""
    return max(choose_pieces(m, local_k, world_size, communicator_blocks).count, 2 * (communicator_blocks or gemm.TYPICAL_SM_COUNT))


@dataclass(frozen=True)
class Memory:
    """What is kept in the arena: room for sizes of up to ``capacity`` rows, and flags of their pieces or tiles."""

    reserved: Reserved
    capacity: int


@dataclass(frozen=True)
class Workspace:
    """What is gathered of left operands of (m, local_k) on each of ``world_size`` ranks, and how it lies in the arena: in slots for up to
    ``capacity`` rows."""

    pieces: Pieces
    capacity: int
    dtype: torch.dtype
    world_size: int
    scatters: bool = False
    header_bytes: int = 0
    """in front of each row"""

    @property
    def m(self) -> int:
        return self.pieces.m

    @property
    def a_rows(self) -> int:
        """The rows of a rank's left operand."""
        return self.m * (self.world_size if self.scatters else 1)

    @property
    def local_k(self) -> int:
        return self.pieces.local_k

    @property
    def row_elements(self) -> int:
        """from a row to the next"""
        return gemm.row_stride(self.local_k) + self.header_bytes // ELEMENT_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.capacity * self.row_elements * ELEMENT_BYTES

    def specs(
        self, a: TensorPlace, b: TensorPlace, out: TensorPlace, gathered: int, tiling: Tiling, major: gemm.Major = "mn"
    ) -> dict[str, TensorMapSpec]:
        """All maps of a launch, by the field they go to; ``gathered`` is the address of this rank's gathered rows. ``b`` is as it lies:
        (W local_k, n), or (n, W local_k) if k is contiguous."""
        parts = b.split(self.world_size) if major == "mn" else b.split_columns(self.world_size)
        return {
            "a": gemm.operand_map(a.split(self.world_size if self.scatters else 1), "k", tiling.block_rows),
            "gathered": self.gathered_map(gathered, tiling),
            "b": parts.map(tiling.b_box(major)),
            "out": gemm.result_map(out.split(1)),
        }

    def gathered_map(self, gathered: int, tiling: Tiling) -> TensorMapSpec:
        shape, strides = (2 * self.world_size, self.m, self.local_k), (self.slot_bytes // ELEMENT_BYTES, self.row_elements, 1)
        return TensorMapSpec(gathered + self.header_bytes, self.dtype, shape, strides, (1, tiling.block_rows, gemm.PANEL))

    def order(self, plan: "Plan") -> GroupedTiles:
        """Pieces in the order in which a plan's tiles use them."""
        rows, columns = self.pieces.grid
        return GroupedTiles(rows=rows, columns=columns, group_rows=plan.tiles.group_rows * plan.tiling.rows // self.pieces.rows)

    def fields(self, plan: "Plan") -> dict[str, Any]:
        """The fields by value of a plan's launches."""
        return {
            "tiles": plan.tiles,
            "pieces": self.order(plan),
            "m": self.m,
            "k": self.local_k,
            "row_bytes": self.row_elements * ELEMENT_BYTES,
            "slot_bytes": self.slot_bytes,
            "header_bytes": self.header_bytes,
            "piece_rows": self.pieces.rows,
            "piece_columns": self.pieces.columns,
            "communicator_blocks": plan.communicator_blocks,
        }


@dataclass(frozen=True)
class Plan:
    """One launch: the first ``communicator_blocks`` blocks of the grid communicate, the others compute. If there are none of the first, a
    warp of every block communicates, and blocks beyond the tiles do nothing else."""

    tiling: Tiling
    tiles: GroupedTiles
    grid: int
    communicator_blocks: int


def order_of_arrival(tiling: Tiling, m: int, n: int, blocks: int) -> GroupedTiles:
    """The order of tiles that ``blocks`` compute: as few rows at a time as keep them busy, for rows are used in the order in which they
    come; but half of what reads least at any rate: B is read once for each group."""
    tiles = tiling.grouped(m, n)
    busy = -(-blocks // (tiling.blocks * tiles.columns))
    tiles.group_rows = min(tiles.rows, max(busy, tiles.group_rows // 2))
    return tiles


def plan(pieces: Pieces, n: int, k: int, sm_count: int, communicator_blocks: int = 0, tilings: Sequence[Tiling] = gemm.TILINGS) -> Plan:
    """The launch for a result of ``n`` columns and ``k`` in all, by the best of the tilings."""
    communicators, m = min(communicator_blocks, pieces.count), pieces.m
    tiling = gemm.choose_tiling(m, n, k, sm_count - communicators, tilings=tilings)
    communicators = -(-communicators // tiling.blocks) * tiling.blocks
    computing = tiling.whole(sm_count - communicators)
    tiles = order_of_arrival(tiling, m, n, computing)
    needed = tiles.rows * tiles.columns * tiling.blocks
    if not communicators:
        needed = max(needed, -(-pieces.count // tiling.blocks) * tiling.blocks)
    return Plan(tiling, tiles, communicators + min(needed, computing), communicators)


def arena_sizes(m: int, local_k: int, world_size: int, pieces: int, header_bytes: int = 0) -> dict[str, int]:
    """Returns the sizes of the fields in the arena, for shards of up to ``m`` rows in up to as many pieces."""
    return {"gathered_memory": 2 * world_size * m * (gemm.row_stride(local_k) * ELEMENT_BYTES + header_bytes), "flags": pieces}
