"""Host side of ``peerlane/products/grouped_gemm.cuh``: groups of rows, each with a matrix of its own, in one launch on one rank."""

import functools

import torch

from peerlane.device.host.declare import U32, BoundKernel, LocalKernel, Map, Pointer, structure
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm
from peerlane.device.products.gemm import ELEMENT_BYTES, PANEL, Epilogue, Major, Tiling
from peerlane.device.products.scales import OperandScales, Scaling, scales_at
from peerlane.errors import UsageError

MAX_GROUPS = 511  # of grouped_gemm.cuh


SOURCE = r"""
#include <peerlane/products/grouped_gemm.cuh>
using namespace peerlane;
using Shape = SHAPE;

extern "C" __global__ void __cluster_dims__(Shape::cluster_blocks) __launch_bounds__(Shape::roles.threads(), 1)
    grouped_gemm(const __grid_constant__ GroupedGemm args) {
    __shared__ u32 tiles[most_products + 1];
    run_roles(GroupedGemmRoles<Shape, GroupedGemm>(args, tiles));
}
"""
GROUPED_GEMM = LocalKernel(
    "grouped_gemm", SOURCE, a=Map(), b=Map(), c=Map(), ends=Pointer("const int*"), out=Pointer(), groups=U32, n=U32, k=U32, row_bytes=U32,
    a_scales=structure("OperandScales", OperandScales), b_scales=structure("OperandScales", OperandScales),
)  # fmt: skip


class GroupedProduct:
    """``call(a, b, ends)``: rows [ends[g - 1], ends[g]) of the result are those of ``a`` (rows, k) times ``b[g]`` (n, k) transposed.

    Either dimension of b's matrices may be contiguous: ``b.transpose(1, 2)`` of matrices (k, n) is not copied.

    ``ends``: int32, one for each group, never falling, on the device; the host does not read them. Rows behind the last end are not
    written. ``rows`` is how many rows are expected in all, by which tiles are chosen; any number will do. k and n are multiples of 8.

    With ``scaling`` operands hold e4m3: k counts pairs, matrices are contiguous along k, and a call gives scales (1, rows, blocks of k)
    of a and (groups, columns, blocks of k) of b."""

    def __init__(
        self,
        group: Group,
        rows: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        tiling: Tiling | None = None,
        scaling: Scaling = "none",
        batch_invariant: bool = False,
    ) -> None:
        groups, n, k = shape
        if dtype not in gemm.ELEMENT_TYPES or n % 8 or k % 8 or not 1 <= groups <= MAX_GROUPS:
            raise UsageError(
                f"{groups} products with matrices ({n}, {k}) in {dtype}: expected 1 to {MAX_GROUPS}, multiples of 8, bfloat16 or float16"
            )
        self.shape, self.maps, self.scaling = shape, tensor_maps(group), scaling
        each = max(1, rows // groups)
        tiling = tiling or gemm.choose_tiling(each, n, k, group.sm_count, groups, tilings=gemm.tilings_for(group, batch_invariant))
        self.tiling = tiling

        def bind(major: Major) -> BoundKernel:
            return GROUPED_GEMM.bind(
                group,
                **tiling.shape(group.sm_count),
                defines=tiling.defines(dtype, "k", major, Epilogue(scaling=scaling)),
                groups=groups,
                n=n,
                k=k,
                row_bytes=n * ELEMENT_BYTES,
            )

        self._bind = functools.cache(bind)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        ends: torch.Tensor,
        a_scales: torch.Tensor | None = None,
        b_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups, n, k = self.shape
        if a.shape[1] != k or tuple(b.shape) != (groups, n, k) or tuple(ends.shape) != (groups,) or ends.dtype != torch.int32:
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} with ends {tuple(ends.shape)} in {ends.dtype}: expected (rows, {k}), "
                f"{(groups, n, k)} and ({groups},) in int32; create a GroupedProduct for each size"
            )
        given = [scales for scales in (a_scales, b_scales) if scales is not None]
        if len(given) != (0 if self.scaling == "none" else 2):
            raise UsageError(
                f"products of groups scaled as {self.scaling!r}: got scales of {len(given)} operands; expected both of e4m3, or none"
            )
        scales = dict(zip(("a_scales", "b_scales"), (scales_at(self.maps.group, one) for one in given), strict=False))
        a, out, maps, tiling = a if gemm.fits_map(a) else gemm.aligned(a), a.new_empty((a.shape[0], n)), self.maps, self.tiling
        major: Major = "mn" if b.transpose(1, 2).is_contiguous() and not b.is_contiguous() else "k"
        stored = b.contiguous() if major == "k" else b.transpose(1, 2)
        b_map = maps(stored.flatten(0, 1), tiling.b_box(major), groups)
        self._bind(major)(a=maps(a, (tiling.block_rows, PANEL)), b=b_map, c=maps(out, (64, PANEL)), ends=ends, out=out, **scales)
        return out


grouped_product = per_group(GroupedProduct)
"""The group's one product of a size."""
