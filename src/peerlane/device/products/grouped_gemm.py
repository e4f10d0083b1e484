"""Host side of ``peerlane/grouped_gemm.cuh``: groups of rows, each with a matrix of its own, in one launch on one rank."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from peerlane.device.host.group import Group, per_group
from peerlane.device.host.tensor_map import TensorMap
from peerlane.device.host.tensor_maps import TensorMaps
from peerlane.device.products import gemm
from peerlane.device.products.gemm import ELEMENT_BYTES, PANEL, Tiling
from peerlane.errors import UsageError

MAX_GROUPS = 511  # of grouped_gemm.cuh


class Parameters(ctypes.Structure):
    """Mirrors ``GroupedParameters`` of the source below."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", TensorMap),
        ("ends", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("groups", ctypes.c_uint32),
        ("n", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
        ("row_bytes", ctypes.c_uint32),
        ("padding", ctypes.c_uint32 * 8),
    )


SOURCE = r"""
#include <peerlane/grouped_gemm.cuh>
using namespace peerlane;
using Shape = SHAPE;

struct GroupedParameters {
    TensorMap a, b, c;
    const int* ends;
    char* out;
    u32 groups, n, k, row_bytes;
};

extern "C" __global__ void __cluster_dims__(Shape::cluster_blocks) __launch_bounds__(Shape::roles.threads(), 1)
    grouped_gemm(const __grid_constant__ GroupedParameters parameters) {
    __shared__ u32 tiles[most_products + 1];
    run_roles(GroupedGemm<Shape, GroupedParameters>(parameters, tiles));
}
"""


class GroupedProduct:
    """``call(a, b, ends)``: rows [ends[g - 1], ends[g]) of the result are those of ``a`` (rows, k) times ``b[g]`` (n, k) transposed.

    ``ends``: int32, one for each group, never falling, on the device; the host does not read them. Rows behind the last end are not
    written. ``rows`` is how many rows are expected in all, by which tiles are chosen; any number will do. k and n are multiples of 8."""

    def __init__(self, group: Group, rows: int, shape: tuple[int, int, int], dtype: torch.dtype, tiling: Tiling | None = None) -> None:
        groups, n, k = shape
        if dtype not in gemm.ELEMENT_TYPES or n % 8 or k % 8 or not 1 <= groups <= MAX_GROUPS:
            raise UsageError(
                f"{groups} products with matrices ({n}, {k}) in {dtype}: expected 1 to {MAX_GROUPS}, multiples of 8, bfloat16 or float16"
            )
        self.group, self.shape, self.maps = group, shape, TensorMaps(group)
        each = max(1, rows // groups)
        tiling = tiling or gemm.choose_tiling(each, n, k, group.sm_count, groups, tilings=gemm.tilings_for(group))
        self.tiling = tiling
        kernel = group.kernel(SOURCE, "grouped_gemm", defines=tiling.defines(dtype, "k", "k"))
        self._arguments = Parameters(groups=groups, n=n, k=k, row_bytes=n * ELEMENT_BYTES)
        self._launch: Any = kernel.bind(
            tiling.whole(group.sm_count), tiling.threads, (self._arguments,), shared_bytes=tiling.shared_bytes, cluster=tiling.blocks
        )

    def __call__(self, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        groups, n, k = self.shape
        if a.shape[1] != k or tuple(b.shape) != (groups, n, k) or tuple(ends.shape) != (groups,) or ends.dtype != torch.int32:
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} with ends {tuple(ends.shape)} in {ends.dtype}: expected (rows, {k}), "
                f"{(groups, n, k)} and ({groups},) in int32; create a GroupedProduct for each size"
            )
        a, out, tiling, arguments = gemm.aligned(a), a.new_empty((a.shape[0], n)), self.tiling, self._arguments
        arguments.a = self.maps(a, (tiling.block_rows, PANEL))
        arguments.b = self.maps(b.contiguous().view(groups * n, k), (tiling.columns // tiling.blocks, PANEL), groups)
        arguments.c = self.maps(out, (64, PANEL))
        arguments.out, arguments.ends = self.group.address(out), self.group.address(ends)
        self._launch()
        return out


@per_group
def grouped_product(group: Group, rows: int, groups: int, n: int, k: int, dtype: torch.dtype) -> GroupedProduct:
    """The group's one :class:`GroupedProduct` of this size."""
    return GroupedProduct(group, rows, (groups, n, k), dtype)
