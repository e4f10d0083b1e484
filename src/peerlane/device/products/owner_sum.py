"""Host side of ``peerlane/owner_sum.cuh``: what products whose tiles are summed by their owners share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.device.host.declare import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Field, Flags, Map
from peerlane.device.host.group import MAX_RANKS, Group
from peerlane.device.host.tensor_map import TensorMapSpec
from peerlane.device.host.tensor_maps import TensorMaps
from peerlane.device.products import gemm
from peerlane.device.products.gemm import Epilogue, GroupedTiles, Tiling
from peerlane.errors import UsageError

FIELDS: Mapping[str, Field] = {
    **gemm.FIELDS,
    "partials": Map(),
    "slots": Map(MAX_RANKS),
    "lag": U32,
    "slot_memory": Buffer(align=1024),
    "flags": Flags(),
    "epochs": Epochs(),
}
"""Of every such kernel."""


@dataclass(frozen=True)
class SumPlan:
    """One kernel: the result of a call, the tiles of a rank, and its slots, (buffers W, slot_rows, slot_columns)."""

    rows: int
    n: int
    dtype: torch.dtype
    tiling: Tiling
    tiles: GroupedTiles
    numbers: int
    """tiles that a rank owns at most"""
    slot_rows: int
    slot_columns: int
    flags: int
    buffers: int

    def lag(self, group: Group) -> int:
        """Own tiles come about a wave of tiles behind the others' of their number, which are on their way meanwhile."""
        return -(-group.sm_count // (self.tiling.blocks * group.world_size))


class OwnerSum:
    """A bound kernel of a plan, and the maps of its calls' tensors."""

    def __init__(
        self, declared: DeclaredKernel, plan: SumPlan, group: Group, epilogue: Epilogue, timeout_s: float, sizes: Mapping[str, int]
    ) -> None:
        tiling, world_size = plan.tiling, group.world_size
        self.plan, self.group, self.epilogue, self.maps = plan, group, epilogue, TensorMaps(group)
        stride = gemm.row_stride(plan.slot_columns)
        self.bound: BoundKernel = declared.bind(
            group,
            **tiling.shape(min(world_size * plan.numbers * tiling.blocks, group.sm_count)),
            resident=True,
            timeout_s=timeout_s,
            defines=tiling.defines(plan.dtype, "k", "mn", epilogue),
            sizes={"slot_memory": plan.buffers * world_size * plan.slot_rows * stride * gemm.ELEMENT_BYTES, "flags": plan.flags, **sizes},
            tiles=plan.tiles,
            n=plan.n,
            lag=plan.lag(group),
        )

        def slots(address: int, box_rows: int) -> TensorMapSpec:
            shape = (plan.buffers * world_size, plan.slot_rows, plan.slot_columns)
            return TensorMapSpec(address, plan.dtype, shape, (plan.slot_rows * stride, stride, 1), (1, box_rows, gemm.PANEL))

        bases = self.bound.addresses("slot_memory")
        self.bound.set(partials=slots(bases[group.rank], tiling.block_rows), slots=[slots(base, 64) for base in bases])

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.bound.arena.close()

    def launch(self, m: int, a: torch.Tensor, b: torch.Tensor, terms: gemm.Terms, **fields: Any) -> None:
        """Of operands (m, k) and (k, n), as ``gemm.aligned`` gives them."""
        plan, tiling = self.plan, self.plan.tiling
        gemm.check_operands(a, b)
        if a.shape[0] != m or b.shape[1] != plan.n or a.dtype != plan.dtype:
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected {m} rows, {plan.n} columns, {plan.dtype}; "
                f"create a {type(self).__name__} for each size"
            )
        last = self.epilogue.fields(self.maps, (plan.rows, plan.n), tiling.block_rows, **terms)
        self.bound(
            a=self.maps(a, gemm.operand_box("k", tiling.block_rows)),
            b=self.maps(b, gemm.operand_box("mn", tiling.columns // tiling.blocks)),
            k=a.shape[1],
            **last,
            **fields,
        )
