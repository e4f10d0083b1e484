"""Host side of ``peerlane/products/owner_sum.cuh``: what products whose tiles are summed by their owners share."""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.device.host.declare import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Field, Flags, Map
from peerlane.device.host.group import MAX_RANKS, Group
from peerlane.device.host.tensor_map import TensorMapSpec
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm
from peerlane.device.products.gemm import ELEMENT_BYTES, Epilogue, Major, Tiling
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
"""The fields of every such kernel."""


@dataclass(frozen=True)
class SumPlan:
    """One size: the result of a call, the tiles of a rank, and its slots, (slot_rows, slot_columns) for each source."""

    rows: int
    n: int
    dtype: torch.dtype
    tiling: Tiling
    tiles: ctypes.Structure
    """what numbers tiles, for the kernel"""
    numbers: int
    """tiles that a rank owns at most"""
    slot_rows: int
    slot_columns: int
    flags: int

    @property
    def slot_stride(self) -> int:
        """elements from a slot's row to the next"""
        return gemm.row_stride(self.slot_columns)

    @property
    def slot_bytes(self) -> int:
        return self.slot_rows * self.slot_stride * ELEMENT_BYTES

    def lag(self, group: Group) -> int:
        """Own tiles come about a wave of tiles behind the others' of their number, which are on their way meanwhile."""
        return -(-group.sm_count // (self.tiling.blocks * group.world_size))


class SumMemory:
    """What a kernel keeps in the arena, with room for each of some plans and for smaller ones. Creating it is collective.

    ``buffers``: how many slots there are for each source; ``sizes``: those of further fields in the arena."""

    def __init__(self, declared: DeclaredKernel, group: Group, plans: Sequence[SumPlan], buffers: int, **sizes: int) -> None:
        self.slots, self.slot_bytes = buffers * group.world_size, max(plan.slot_bytes for plan in plans)
        sizes |= {"slot_memory": self.slots * self.slot_bytes, "flags": max(plan.flags for plan in plans)}
        self.reserved = declared.reserve(group, sizes=sizes)

    def slot_map(self, address: int, plan: SumPlan, box_rows: int) -> TensorMapSpec:
        """The slots of a plan, on the rank whose slot memory lies at this address."""
        shape, stride = (self.slots, plan.slot_rows, plan.slot_columns), self.slot_bytes // ELEMENT_BYTES
        return TensorMapSpec(address, plan.dtype, shape, (stride, plan.slot_stride, 1), (1, box_rows, gemm.PANEL))


class OwnerSum:
    """The launch of a plan, and the maps of its calls' tensors."""

    def __init__(self, memory: SumMemory, plan: SumPlan, epilogue: Epilogue, **fields: Any) -> None:
        group = memory.reserved.group
        self.memory, self.plan, self.group, self.epilogue, self.maps = memory, plan, group, epilogue, tensor_maps(group)
        bases = memory.reserved.addresses("slot_memory")
        self.bound = functools.cache(functools.partial(self._bound, bases, fields))
        self.bound("mn" if epilogue.scaling == "none" else "k")

    def _bound(self, bases: Sequence[int], fields: Mapping[str, Any], major: Major) -> BoundKernel:
        memory, plan, tiling, group = self.memory, self.plan, self.plan.tiling, self.group
        return memory.reserved.bind(
            **tiling.shape(min(group.world_size * plan.numbers * tiling.blocks, group.sm_count)),
            resident=True,
            defines=tiling.defines(plan.dtype, "k", major, self.epilogue),
            partials=memory.slot_map(bases[group.rank], plan, tiling.block_rows),
            slots=[memory.slot_map(base, plan, 64) for base in bases],
            tiles=plan.tiles,
            n=plan.n,
            lag=plan.lag(group),
            **fields,
        )

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.memory.reserved.close()

    def launch(self, m: int, a: torch.Tensor, b: torch.Tensor, terms: gemm.Terms, **fields: Any) -> None:
        """Launches the product of operands (m, k), as ``gemm.aligned`` gives it, and (k, n) as it lies."""
        plan, tiling = self.plan, self.plan.tiling
        gemm.check_operands(a, b)
        if a.shape[0] != m or b.shape[1] != plan.n or a.dtype != plan.dtype:
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected {m} rows, {plan.n} columns, {plan.dtype}; "
                f"create a {type(self).__name__} for each size"
            )
        last = self.epilogue.fields(self.maps, (plan.rows, plan.n), tiling.block_rows, **terms)
        right, major = gemm.stored(b)
        self.bound(major)(
            a=self.maps(a, gemm.operand_box("k", tiling.block_rows)),
            b=self.maps(right, tiling.b_box(major)),
            k=a.shape[1],
            **last,
            **fields,
        )
