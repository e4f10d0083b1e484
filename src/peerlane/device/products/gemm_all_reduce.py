"""Host side of ``peerlane/products/gemm_all_reduce.cuh``: a sum of products over ranks, on every rank, in one launch."""

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.distributed as dist

from peerlane.device.host.declare import Buffer, DeclaredKernel, Map, roles_source
from peerlane.device.host.group import MAX_RANKS, Group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_map import TensorPlace
from peerlane.device.products import gemm, owner_sum
from peerlane.device.products.gemm import Epilogue, Tiling
from peerlane.device.products.owner_sum import OwnerSum, SumMemory, SumPlan
from peerlane.errors import UsageError

SOURCE = roles_source("gemm_all_reduce", "products/gemm_all_reduce.cuh", "GemmAllReduceRoles", "WORLD_SIZE")
GEMM_ALL_REDUCE = DeclaredKernel("gemm_all_reduce", SOURCE, out=Map(MAX_RANKS), result=Buffer(align=1024), **owner_sum.FIELDS)


def _plan(group: Group, m: int, n: int, dtype: torch.dtype, tiling: Tiling) -> SumPlan:
    tiles = tiling.grouped(m, n)
    numbers = -(-tiles.rows * tiles.columns // group.world_size)
    flags = 2 * numbers * (tiling.rows // 64)
    return SumPlan(m, n, dtype, tiling, tiles, numbers, numbers * tiling.rows, tiling.columns, flags)


def sum_memory(
    group: Group, m: int, n: int, dtype: torch.dtype, tilings: Sequence[Tiling], declared: DeclaredKernel = GEMM_ALL_REDUCE
) -> SumMemory:
    """Collective: for all sizes of up to ``m`` rows."""
    plans = [_plan(group, m, n, dtype, tiling) for tiling in tilings]
    return SumMemory(declared, group, plans, buffers=1, result=m * gemm.row_stride(n) * gemm.ELEMENT_BYTES)


class GemmAllReduce(OwnerSum):
    """``call(a, b)`` for one shape of result: every rank gets the sum over ranks of ``a @ b``, the same bits on all.

    a (m, k), as ``gemm.aligned`` gives it, and b (k, n), as it lies: bfloat16 or float16; m, n and the dtype the same on all ranks, k as it
    comes, but not 0. The epilogue's bias, residual (m, n) and scale are the same on all ranks. The result lies in the arena and is valid
    until the next call with the same memory. Creating one is collective, unless its ``memory`` is given. Calls in one stream need no
    barrier between them and can be captured in a graph."""

    def __init__(
        self,
        m: int,
        n: int,
        dtype: torch.dtype,
        group: Group | dist.ProcessGroup | None = None,
        *,
        epilogue: Epilogue = gemm.PLAIN,
        tiling: Tiling | None = None,
        memory: SumMemory | None = None,
    ) -> None:
        ranks = group_of(group)
        if dtype not in gemm.ELEMENT_TYPES or not m * n:
            raise UsageError(
                f"GEMM and all-reduce of ({m}, {n}) in {dtype}: "
                "expected bfloat16 or float16, and no size of 0; use a product and a collective otherwise"
            )
        tilings = gemm.tilings_for(ranks, epilogue.batch_invariant)
        tiling = tiling or gemm.choose_tiling(m, n, gemm.TYPICAL_DEPTH, ranks.sm_count, tilings=tilings)
        memory, stride = memory or sum_memory(ranks, m, n, dtype, [tiling]), gemm.row_stride(n)
        places = [TensorPlace(address, dtype, (m, n), (stride, 1)) for address in memory.reserved.addresses("result")]
        out = [gemm.result_map(place.split(1)) for place in places]
        super().__init__(memory, _plan(ranks, m, n, dtype, tiling), epilogue, out=out)
        self.result = memory.reserved.tensor("result", (m, stride), dtype)[:, :n]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **terms: Unpack[gemm.Terms]) -> torch.Tensor:
        self.launch(self.plan.rows, a, b, terms)
        return self.result


gemm_all_reduce, memory_of = gemm.kept_products(
    GemmAllReduce, "gemm_all_reduce", lambda group, m, n, dtype: sum_memory(group, m, n, dtype, gemm.tilings_for(group))
)
"""A result is valid until the next call with as many columns."""
