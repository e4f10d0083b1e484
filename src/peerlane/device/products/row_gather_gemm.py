"""Host side of ``peerlane/products/row_gather_gemm.cuh``: products whose left operand lies in rows on all ranks, in one launch.

With GEMM + reduce-scatter it is the pair of kernels of a tensor-parallel layer whose activations are sharded along the sequence: this one
in front of a column-parallel product, that one behind a row-parallel one, and the other way round for their gradients.

Bound: the larger of 2 W m n k FLOPs on the tensor cores and (W - 1) m k elements into a rank's port. A W-th of the tiles, those of own
rows, need nothing from a port. So the tensor cores are the bound from about 2,000 columns on, at an H200's 700 TFLOP/s and 343 GB/s. What
limits it below that is the arrival of the last pieces, and above it the fences of the warps that push: where a tile takes long, a fence
does.

Device lines: 86 of ``row_gather_gemm.cuh``, 12 of which communicate, and 99 of ``gathered_pieces.cuh``, which it shares. Registers: 168 a
thread at entry, 224 of a consumer; shared memory: all of an SM's, so that one block is resident.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device.host.declare import (
    F32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    Map,
    Pointer,
    array,
    roles_source,
    structure,
)
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm
from peerlane.device.products.capacity import with_room
from peerlane.device.products.gathering import Memory, Plan, Workspace, arena_sizes, choose_pieces, most_pieces, order_of_arrival
from peerlane.device.products.gemm import ELEMENT_BYTES, Epilogue, GroupedTiles, Major, Tiling
from peerlane.device.products.scales import OperandScales, header_bytes, scales_at
from peerlane.errors import UsageError

MAX_PRODUCTS = 4  # of row_gather_gemm.cuh

FIELDS: Mapping[str, Field] = {
    **{name: Map() for name in ("a", "gathered", "residual")},
    **{name: Map(MAX_PRODUCTS) for name in ("b", "out")},
    **dict.fromkeys(("tiles", "pieces"), structure("GroupedTiles", GroupedTiles)),
    **dict.fromkeys(("n", "first"), array(U32, MAX_PRODUCTS)),
    "b_scales": array(structure("OperandScales", OperandScales), MAX_PRODUCTS),
    **dict.fromkeys(("m", "k", "row_bytes", "header_bytes", "piece_rows", "piece_columns", "communicator_blocks"), U32),
    "scale": F32,
    "bias": array(Field("const char*", U64.twin), MAX_PRODUCTS),
    "slot_bytes": U64,
    "local": Pointer("const char*", strided=True),
    "whole": Pointer(strided=True),
    "gathered_memory": Buffer(align=1024),
    "flags": Flags(),
    "epochs": Epochs(),
}

SOURCE = roles_source(
    "row_gather_gemm", "products/row_gather_gemm.cuh", "RowGatherGemmRoles", "WORLD_SIZE", "KEEPS", communicator_blocks=True
)
ROW_GATHER_GEMM = DeclaredKernel("row_gather_gemm", SOURCE, **FIELDS)


def reserve(group: Group, m: int, k: int, header: int = 0) -> Memory:
    """Collective: for all sizes of up to ``m`` rows on each rank, with ``header`` bytes in front of each row."""
    sizes = arena_sizes(m, k, group.world_size, most_pieces(m, k, group.world_size), header)
    return Memory(ROW_GATHER_GEMM.reserve(group, sizes=sizes), m)


def plan(space: Workspace, widths: Sequence[int], sm_count: int, tilings: Sequence[Tiling]) -> tuple[Plan, list[int]]:
    """The launch of products of these widths, and the first column of tiles of each and behind the last."""
    world, pieces, m = space.world_size, space.pieces, space.m
    tiling = gemm.choose_tiling(m, sum(widths), space.local_k, sm_count, parts=world, tilings=tilings)
    first = [0]
    for width in widths:
        first.append(first[-1] + -(-width // tiling.columns))
    computing = tiling.whole(sm_count)
    tiles = order_of_arrival(tiling, m, tiling.columns * first[-1], computing)
    needed = max(world * tiles.rows * tiles.columns, -(-pieces.count // tiling.blocks)) * tiling.blocks
    return Plan(tiling, tiles, min(needed, computing), communicator_blocks=0), first


class RowGatherGemm:
    """``call(a, [b, ...])`` for one shape of left operand: every rank gets ``[cat(all ranks' a) @ b, ...]`` with its own b's.

    a (m, k), as ``gemm.aligned`` gives it; one to four b's (k, n), as they lie, see ``gemm.stored``, all in the same way, which is the same
    on all ranks; results (W m, n), laid out as ``gemm.aligned`` does. bfloat16 or float16; m, k and the dtype are the same on all ranks,
    n is as it comes. With ``keeps`` there is one more result behind the others: all ranks' rows (W m, k). Of the epilogue each b has a bias
    (n) of its own, a residual (W m, n) there is for one b only. With scales, k counts pairs of e4m3, and a is whole rows with the header of
    ``header_bytes`` in front of them, in which the row's scales are; so are the rows that are kept. Creating one is collective, unless
    its ``memory`` is given. Calls in one stream need no barrier between them and can be captured in a graph."""

    def __init__(
        self,
        m: int,
        k: int,
        dtype: torch.dtype,
        group: Group | dist.ProcessGroup | None = None,
        *,
        epilogue: Epilogue = gemm.PLAIN,
        keeps: bool = False,
        tiling: Tiling | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.group, self.epilogue, self.keeps = group_of(group), epilogue, keeps
        if dtype not in gemm.ELEMENT_TYPES or not m * k or self.group.world_size < 2:
            raise UsageError(
                f"all-gather of rows ({m}, {k}) in {dtype} from {self.group.world_size} ranks and GEMM: expected bfloat16 or float16, no "
                "size of 0 and at least 2 ranks; use a product and a collective otherwise"
            )
        self.tilings = gemm.tilings_for(self.group, epilogue.batch_invariant) if tiling is None else [tiling]
        header = header_bytes(epilogue.scaling, k)
        self.maps, self.memory = tensor_maps(self.group), memory or reserve(self.group, m, k, header)
        pieces = choose_pieces(m, k, self.group.world_size)
        self.space = Workspace(pieces, self.memory.capacity, dtype, self.group.world_size, header_bytes=header)
        self._bound = functools.cache(self._bind)

    def __call__(
        self,
        a: torch.Tensor,
        bs: Sequence[torch.Tensor],
        *,
        biases: Sequence[torch.Tensor] = (),
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
        b_scales: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        space, world, maps = self.space, self.group.world_size, self.maps
        rows, a = a, a[:, space.header_bytes // ELEMENT_BYTES :]
        self._check(a, bs, biases, residual)
        if len(b_scales) != (len(bs) if self.epilogue.scaling != "none" else 0):
            raise UsageError(
                f"{len(bs)} products with the epilogue {self.epilogue}: got scales of {len(b_scales)}; expected one for each of e4m3"
            )
        stored = [gemm.stored(b) for b in bs]
        if len({major for _, major in stored}) > 1:
            stored = [(gemm.aligned(b), "mn") for b in bs]
        widths = tuple(b.shape[1] for b in bs)
        launch, tiling = self._bound(widths, stored[0][1])
        outs = [gemm.empty_aligned(world * space.m, width, a) for width in widths]
        if self.keeps:
            outs.append(gemm.empty_aligned(world * space.m, rows.shape[1], a))
        fields: dict[str, Any] = {"whole": outs[-1]} if self.keeps else {}
        if self.epilogue.bias:
            fields["bias"] = [self.group.address(bias) for bias in biases]
        if b_scales:
            fields["b_scales"] = [scales_at(self.group, scales) for scales in b_scales]
        if residual is not None:
            residual = gemm.aligned(residual)
            fields["residual"] = maps(residual, (tiling.block_rows, gemm.PANEL), world)
        launch(
            a=maps(a, gemm.operand_box("k", tiling.block_rows)),
            b=[maps(right, tiling.b_box(major)) for right, major in stored],
            out=[maps(out, (64, gemm.PANEL), world) for out in outs[: len(widths)]],
            local=rows,
            scale=scale,
            **fields,
        )
        return outs

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.memory.reserved.close()

    def _bind(self, widths: tuple[int, ...], major: Major) -> tuple[BoundKernel, Tiling]:
        """The launch of products of these widths, and its tiles. It is not collective."""
        space, reserved = self.space, self.memory.reserved
        chosen, first = plan(space, widths, self.group.sm_count, self.tilings)
        tiling, world = chosen.tiling, space.world_size
        # Pieces in the order in which tiles of other ranks' rows use them: those of all ranks take turns.
        turns = replace_rows(chosen, -(-chosen.tiles.group_rows // (world - 1)))
        launch = reserved.bind(
            **tiling.shape(chosen.grid),
            resident=True,
            defines={**tiling.defines(space.dtype, "k", major, self.epilogue), "KEEPS": int(self.keeps)},
            **{**space.fields(chosen), "pieces": space.order(turns)},
            gathered=space.gathered_map(reserved.addresses("gathered_memory")[self.group.rank], tiling),
            n=[*widths, *[0] * (MAX_PRODUCTS - len(widths))],
            first=[*first[:-1], *[first[-1]] * (MAX_PRODUCTS - len(widths))],
        )
        return launch, tiling

    def _check(self, a: torch.Tensor, bs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], residual: torch.Tensor | None) -> None:
        space, epilogue, world = self.space, self.epilogue, self.group.world_size
        shapes = [tuple(b.shape) for b in bs]
        if (
            not 1 <= len(bs) <= MAX_PRODUCTS
            or tuple(a.shape) != (space.m, space.local_k)
            or any(len(shape) != 2 or shape[0] != space.local_k or not shape[1] for shape in shapes)
            or {a.dtype, *(b.dtype for b in bs)} != {space.dtype}
        ):
            raise UsageError(
                f"operands {tuple(a.shape)} and {shapes} in {a.dtype}: expected ({space.m}, {space.local_k}), and 1 to {MAX_PRODUCTS} of "
                f"({space.local_k}, n) in {space.dtype}; create a RowGatherGemm for each size"
            )
        wanted = [(shape[1],) for shape in shapes] if epilogue.bias else []
        if [tuple(bias.shape) for bias in biases] != wanted:
            raise UsageError(
                f"a product with the epilogue {epilogue}: got biases of {[tuple(bias.shape) for bias in biases]}; expected {wanted}"
            )
        if (residual is not None) != epilogue.residual or (
            residual is not None and (len(bs) > 1 or tuple(residual.shape) != (world * space.m, shapes[0][1]))
        ):
            got = "none" if residual is None else f"one of {tuple(residual.shape)}"
            expected = f"one of {(world * space.m, shapes[0][1])}, and one right operand" if epilogue.residual else "none"
            raise UsageError(f"{len(bs)} products with the epilogue {epilogue}: got residual {got}; expected {expected}")


def replace_rows(chosen: Plan, group_rows: int) -> Plan:
    tiles = chosen.tiles
    return replace(chosen, tiles=GroupedTiles(rows=tiles.rows, columns=tiles.columns, group_rows=group_rows))


@per_group
def row_gather_gemm(
    group: Group, m: int, k: int, dtype: torch.dtype, epilogue: Epilogue = gemm.PLAIN, keeps: bool = False
) -> RowGatherGemm:
    """The group's one :class:`RowGatherGemm` of this kind and size; the first call of a capacity is collective."""
    header = header_bytes(epilogue.scaling, k)
    memory = with_room(memory_of, group, m, k, header) if header else with_room(memory_of, group, m, k)
    return RowGatherGemm(m, k, dtype, group, epilogue=epilogue, keeps=keeps, memory=memory)


memory_of = per_group(reserve)
"""Memory for all sizes of up to ``m`` rows on each rank."""
