"""Host side of ``peerlane/all_gather_gemm.cuh``: a product whose left operand lies in columns on all ranks, in one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.distributed as dist

from peerlane.device.host.declare import (
    U32,
    U64,
    BoundKernel,
    BoundLaunches,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    Map,
    Pointer,
    Reserved,
    structure,
)
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.device.host.tensor_maps import TensorMaps
from peerlane.device.products import gemm
from peerlane.device.products.capacity import capacity
from peerlane.device.products.gemm import ELEMENT_BYTES, Epilogue, GroupedTiles, Tiling
from peerlane.errors import UsageError

_SENT_BYTES, _PIECE_BYTES = 48 << 10, 32 << 10
"""What one signal speaks for at most: of a warp, what it stores at all ranks, and of a communicator block. A dozen us of stores, so that a
signal costs little and pieces do not come late."""
_SHORT_PIECE_BYTES = 4 << 10
"""What pieces are not cut below to have one for every sender."""
_PIECE_COLUMNS, _COLUMN_PIECES = 256, 4
"""Columns are cut into as many pieces, none of them narrower than this: rows of 512 bytes are what a warp stores at a time."""
COMMUNICATOR_BLOCKS = (8, 16)
"""What is tried beside a warp of every block."""


FIELDS: Mapping[str, Field] = {
    **gemm.FIELDS,
    **{name: Map() for name in ("gathered", "out")},
    "pieces": structure("GroupedTiles", GroupedTiles),
    **dict.fromkeys(("m", "row_bytes", "piece_rows", "piece_columns", "communicator_blocks"), U32),
    "slot_bytes": U64,
    "local": Pointer("const char*", strided=True),
    "gathered_memory": Buffer(align=1024),
    "flags": Flags(),
    "epochs": Epochs(),
}
"""Of every kernel whose left operand is gathered."""


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
class Workspace:
    """What is gathered of left operands of (m, local_k) on each of ``world_size`` ranks, and how it lies in the arena: in slots for up to
    ``capacity`` rows."""

    pieces: Pieces
    capacity: int
    dtype: torch.dtype
    world_size: int
    scatters: bool = False

    @property
    def m(self) -> int:
        return self.pieces.m

    @property
    def a_rows(self) -> int:
        """of the left operand of a rank"""
        return self.m * (self.world_size if self.scatters else 1)

    @property
    def local_k(self) -> int:
        return self.pieces.local_k

    @property
    def row_elements(self) -> int:
        """from a row to the next"""
        return gemm.row_stride(self.local_k)

    @property
    def slot_bytes(self) -> int:
        return self.capacity * self.row_elements * ELEMENT_BYTES

    def specs(self, a: TensorPlace, b: TensorPlace, out: TensorPlace, gathered: int, tiling: Tiling) -> dict[str, TensorMapSpec]:
        """All maps of a launch, by the field they go to; ``gathered`` is the address of this rank's gathered rows."""
        return {
            "a": gemm.operand_map(a.split(self.world_size if self.scatters else 1), "k", tiling.block_rows),
            "gathered": self.gathered_map(gathered, tiling),
            "b": gemm.operand_map(b.split(self.world_size), "mn", tiling.columns // tiling.blocks),
            "out": gemm.result_map(out.split(1)),
        }

    def gathered_map(self, gathered: int, tiling: Tiling) -> TensorMapSpec:
        shape, strides = (2 * self.world_size, self.m, self.local_k), (self.slot_bytes // ELEMENT_BYTES, self.row_elements, 1)
        return TensorMapSpec(gathered, self.dtype, shape, strides, (1, tiling.block_rows, gemm.PANEL))

    def order(self, plan: Plan) -> GroupedTiles:
        """Pieces in the order in which a plan's tiles use them."""
        rows, columns = self.pieces.grid
        return GroupedTiles(rows=rows, columns=columns, group_rows=plan.tiles.group_rows * plan.tiling.rows // self.pieces.rows)

    def fields(self, plan: Plan) -> dict[str, Any]:
        """The fields by value of a plan's launches."""
        return {
            "tiles": plan.tiles,
            "pieces": self.order(plan),
            "m": self.m,
            "k": self.local_k,
            "row_bytes": self.row_elements * ELEMENT_BYTES,
            "slot_bytes": self.slot_bytes,
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


def plan(pieces: Pieces, n: int, k: int, sm_count: int, communicator_blocks: int = 0, tilings: Sequence[Tiling] = gemm.TILINGS) -> Plan:
    """The launch for a result of ``n`` columns and ``k`` in all, by the best of the tilings."""
    communicators, m = min(communicator_blocks, pieces.count), pieces.m
    tiling = gemm.choose_tiling(m, n, k, sm_count - communicators, tilings=tilings)
    communicators = -(-communicators // tiling.blocks) * tiling.blocks
    computing = tiling.whole(sm_count - communicators)
    tiles = tiling.grouped(m, n)
    rows, columns = tiles.rows, tiles.columns
    # As few rows at a time as keep all compute blocks busy, for rows are used in the order in which they come; but half of what reads least
    # at any rate: B is read once for each group.
    busy = -(-computing // (tiling.blocks * columns))
    tiles.group_rows = min(rows, max(busy, tiles.group_rows // 2))
    needed = rows * columns * tiling.blocks
    if not communicators:
        needed = max(needed, -(-pieces.count // tiling.blocks) * tiling.blocks)
    return Plan(tiling, tiles, communicators + min(needed, computing), communicators)


SOURCE = r"""
#include <peerlane/all_gather_gemm.cuh>
using namespace peerlane;
using Shape = SHAPE;

extern "C" __global__ void __cluster_dims__(Shape::cluster_blocks) __launch_bounds__(Shape::roles.threads(), 1)
    all_gather_gemm(const __grid_constant__ Arena arena, const __grid_constant__ AllGatherGemm args) {
    run_roles(AllGatherGemmRoles<Shape, WORLD_SIZE, SCATTERS, AllGatherGemm>(args, arena), args.communicator_blocks);
}
"""
ALL_GATHER_GEMM = DeclaredKernel("all_gather_gemm", SOURCE, **FIELDS)


@dataclass(frozen=True)
class Memory:
    """What is kept in the arena: room for shards of up to ``capacity`` rows, and flags of their pieces."""

    reserved: Reserved
    capacity: int


def arena_sizes(m: int, local_k: int, world_size: int, pieces: int) -> dict[str, int]:
    """Of the fields in the arena, for shards of up to ``m`` rows in up to as many pieces."""
    return {"gathered_memory": 2 * world_size * m * gemm.row_stride(local_k) * ELEMENT_BYTES, "flags": pieces}


def _memory(group: Group, m: int, local_k: int, communicator_blocks: Sequence[int]) -> Memory:
    """Collective: for all sizes of up to ``m`` rows, sent by any of these numbers of blocks."""
    pieces = max(most_pieces(m, local_k, group.world_size, blocks) for blocks in communicator_blocks)
    return Memory(ALL_GATHER_GEMM.reserve(group, sizes=arena_sizes(m, local_k, group.world_size, pieces)), m)


class AllGatherGemm:
    """``call(a, b)`` for one shape of left operand: every rank gets ``[a_0 | a_1 | ...] @ b`` with its own b. With ``scatters`` every rank
    has W m rows, and rank r gets rows [r m, (r + 1) m) of that product.

    a (m, local_k), b (W local_k, n): bfloat16 or float16, as ``gemm.aligned`` gives them; m, local_k and the dtype the same on all ranks.
    The result is laid out in the same way. Creating one is collective, unless its ``memory`` is given. Calls in one stream need no barrier
    between them and can be captured in a graph. ``communicator_blocks`` of the blocks only send; with 0, the default, a spare warp of every
    block does. The epilogue's bias (n), residual (m, n) and scale are this rank's."""

    def __init__(
        self,
        m: int,
        local_k: int,
        dtype: torch.dtype,
        group: Group | dist.ProcessGroup | None = None,
        *,
        communicator_blocks: int = 0,
        scatters: bool = False,
        epilogue: Epilogue = gemm.PLAIN,
        tiling: Tiling | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.group, self.epilogue, self._plain = group_of(group), epilogue, epilogue == gemm.PLAIN
        self.tilings = gemm.tilings_for(self.group) if tiling is None else [tiling]
        self.maps = TensorMaps(self.group)
        world_size = self.group.world_size
        if scatters and communicator_blocks:
            raise UsageError(f"an all-to-all by {communicator_blocks} communicator blocks: expected 0; a warp of every block sends")
        if dtype not in gemm.ELEMENT_TYPES or not m * local_k:
            raise UsageError(
                f"all-gather of ({m}, {local_k}) in {dtype} and GEMM: "
                "expected bfloat16 or float16, and no size of 0; use a product and a collective otherwise"
            )
        self.communicator_blocks = communicator_blocks
        self.memory = memory or _memory(self.group, m, local_k, [communicator_blocks])
        pieces = choose_pieces(m, local_k, world_size, communicator_blocks)
        self.workspace = Workspace(pieces, self.memory.capacity, dtype, world_size, scatters)
        self._launches = BoundLaunches[tuple[int, int, int, int]]()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **terms: Unpack[gemm.Terms]) -> torch.Tensor:
        out = gemm.empty_aligned(self.workspace.m, b.shape[1], a)
        key = self.group.address(a), self.group.address(b), self.group.address(out), b.shape[1]
        launch = self._launches.get(key, lambda: self.bind(a, b, out))
        if terms or not self._plain:
            rows = self.plan_for(b).tiling.block_rows
            launch.set(**self.epilogue.fields(self.maps, (self.workspace.m, b.shape[1]), rows, **terms))
        launch()
        return out

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.memory.reserved.close()

    def plan_for(self, b: torch.Tensor) -> Plan:
        return plan(self.workspace.pieces, b.shape[1], b.shape[0], self.group.sm_count, self.communicator_blocks, self.tilings)

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> BoundKernel:
        """The launch for these tensors. It holds their addresses, not them."""
        space = self.workspace
        if (
            tuple(a.shape) != (space.a_rows, space.local_k)
            or b.shape[0] != space.world_size * space.local_k
            or {a.dtype, b.dtype} != {space.dtype}
        ):
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected ({space.a_rows}, {space.local_k}) and "
                f"({space.world_size * space.local_k}, n) in {space.dtype}; create an AllGatherGemm for each size"
            )
        chosen = self.plan_for(b)
        tiling, place = chosen.tiling, self.group.place
        gathered = self.memory.reserved.addresses("gathered_memory")[self.group.rank]
        return self.memory.reserved.bind(
            **tiling.shape(chosen.grid),
            resident=True,
            defines={**tiling.defines(a.dtype, "k", "mn", self.epilogue), "SCATTERS": int(space.scatters)},
            **space.fields(chosen),
            **space.specs(place(a), place(b), place(out), gathered, tiling),
            n=b.shape[1],
            local=a,
        )


@per_group
def all_gather_gemm(
    group: Group, m: int, local_k: int, dtype: torch.dtype, scatters: bool = False, epilogue: Epilogue = gemm.PLAIN, n: int = 0
) -> AllGatherGemm:
    """The group's one :class:`AllGatherGemm` of this kind and size; the first call of a capacity is collective. It is tuned for ``n``
    columns, the same on all ranks; 0: it follows the model."""
    room = capacity(m)
    blocks, tiling = _fastest(group, room, local_k, dtype, scatters, n) if n else (0, None)
    memory = _of_capacity(group, room, local_k, dtype, scatters)
    return AllGatherGemm(
        m, local_k, dtype, group, communicator_blocks=blocks, scatters=scatters, epilogue=epilogue, tiling=tiling, memory=memory
    )


@per_group
def _of_capacity(group: Group, m: int, local_k: int, dtype: torch.dtype, scatters: bool) -> Memory:
    """Memory for all sizes of up to ``m`` rows."""
    return _memory(group, m, local_k, [0] if scatters else [0, *COMMUNICATOR_BLOCKS])


@per_group
def _fastest(group: Group, m: int, local_k: int, dtype: torch.dtype, scatters: bool, n: int) -> tuple[int, Tiling | None]:
    """Communicator blocks and tiling for a result of ``n`` columns; no tiling: what the model says."""
    k = group.world_size * local_k
    best, *others = gemm.rank_tilings(m, n, k, group.sm_count, tilings=gemm.tilings_for(group))
    options: list[tuple[int, Tiling | None]] = [(0, None), *((0, tiling) for tiling in others[:2])]
    options += [(blocks, best) for blocks in COMMUNICATOR_BLOCKS if not scatters]

    def make(option: tuple[int, Tiling | None]) -> AllGatherGemm:
        return AllGatherGemm(m, local_k, dtype, group, communicator_blocks=option[0], scatters=scatters, tiling=option[1])

    shapes = (m * (group.world_size if scatters else 1), local_k), (k, n)
    return gemm.tuned(group, "all_to_all_gemm" if scatters else "all_gather_gemm", shapes, dtype, options, make)
