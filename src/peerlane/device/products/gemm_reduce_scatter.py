"""Host side of ``peerlane/products/gemm_reduce_scatter.cuh``: rows of a sum of products over ranks, in one launch."""

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.distributed as dist

from peerlane.device.host.declare import U32, DeclaredKernel, Map, roles_source
from peerlane.device.host.group import Group
from peerlane.device.host.group_of import group_of
from peerlane.device.products import gemm, owner_sum
from peerlane.device.products.gemm import Epilogue, Tiling
from peerlane.device.products.owner_sum import OwnerSum, SumMemory, SumPlan
from peerlane.errors import UsageError

SOURCE = roles_source("gemm_reduce_scatter", "products/gemm_reduce_scatter.cuh", "GemmReduceScatterRoles", "WORLD_SIZE")
GEMM_REDUCE_SCATTER = DeclaredKernel("gemm_reduce_scatter", SOURCE, out=Map(), local_rows=U32, **owner_sum.FIELDS)


def _plan(group: Group, rows: int, n: int, dtype: torch.dtype, tiling: Tiling) -> SumPlan:
    """Returns the plan for ``rows`` rows of the result on each rank."""
    tiles = tiling.grouped(rows, n, parts=group.world_size)
    count = tiles.rows * tiles.columns
    return SumPlan(rows, n, dtype, tiling, tiles, count, rows, n, flags=count * (tiling.rows // 64))


def _memory(group: Group, rows: int, n: int, dtype: torch.dtype, tilings: Sequence[Tiling]) -> SumMemory:
    """Collective: for all sizes of up to ``rows`` rows on each rank."""
    return SumMemory(GEMM_REDUCE_SCATTER, group, [_plan(group, rows, n, dtype, tiling) for tiling in tilings], buffers=2)


class GemmReduceScatter(OwnerSum):
    """``call(a, b)`` for one shape of result: rank r gets rows [r m / W, (r + 1) m / W) of the sum over ranks of ``a @ b``.

    a (m, k), as ``gemm.aligned`` gives it, and b (k, n), as it lies: bfloat16 or float16; m divisible by the world size; m, n and the dtype
    the same on all ranks, k as it comes, but not 0. The result is laid out in the same way; bias and residual (m / W, n) of the epilogue
    are this rank's. Creating one is collective, unless its ``memory`` is given. Calls in one stream need no barrier between them and can be
    captured in a graph."""

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
        world_size, rows = ranks.world_size, m // ranks.world_size
        if m % world_size or dtype not in gemm.ELEMENT_TYPES:
            raise UsageError(
                f"GEMM and reduce-scatter of ({m}, {n}) in {dtype} over {world_size} ranks: expected m divisible by the ranks, and "
                "bfloat16 or float16; pad the rows with zeros or convert the operands"
            )
        if tiling is None:
            tilings = gemm.tilings_for(ranks, epilogue.batch_invariant)
            tiling = gemm.choose_tiling(rows, n, gemm.TYPICAL_DEPTH, ranks.sm_count, parts=world_size, tilings=tilings)
        memory = memory or _memory(ranks, rows, n, dtype, [tiling])
        super().__init__(memory, _plan(ranks, rows, n, dtype, tiling), epilogue, local_rows=rows)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **terms: Unpack[gemm.Terms]) -> torch.Tensor:
        out = gemm.empty_aligned(self.plan.rows, self.plan.n, a)
        self.launch(self.plan.rows * self.group.world_size, a, b, terms, out=self.maps(out, (64, gemm.PANEL)))
        return out


gemm_reduce_scatter, memory_of = gemm.kept_products(
    GemmReduceScatter,
    "gemm_reduce_scatter",
    lambda group, rows, n, dtype: _memory(group, rows, n, dtype, gemm.tilings_for(group)),
    in_parts=True,
)
