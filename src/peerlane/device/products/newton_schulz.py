"""Host side of ``peerlane/products/newton_schulz.cuh``: products of a Newton-Schulz iteration X <- a X + (b G + c G^2) X, G = X X^T."""

import ctypes

import torch

from peerlane.device.host.declare import F32, U32, Buffer, DeclaredKernel, LocalKernel, Map, roles_source, structure
from peerlane.device.host.group import MAX_RANKS, Group, per_group
from peerlane.device.host.tensor_map import TensorPlace
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm, owner_sum
from peerlane.device.products.gemm import Tiling
from peerlane.device.products.owner_sum import OwnerSum, SumMemory, SumPlan
from peerlane.errors import UsageError


class TriangleTiles(ctypes.Structure):
    """Mirrors ``peerlane::TriangleTiles``."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("columns", "total", "tile_rows", "tile_columns"))


def triangle_count(tiling: Tiling, m: int, n: int) -> int:
    """Tiles of a square result with something on or above the diagonal."""
    rows, columns = tiling.grid(m, n)
    return sum(columns - row * tiling.rows // tiling.columns for row in range(rows))


def triangle(tiling: Tiling, m: int) -> TriangleTiles:
    """The tiles of an (m, m) result that are computed."""
    return TriangleTiles(tiling.grid(m, m)[1], triangle_count(tiling, m, m), tiling.rows, tiling.columns)


def _choose(group: Group, m: int, k: int) -> Tiling:
    return gemm.rank_tilings(m, m, k, group.sm_count, tilings=gemm.tilings_for(group), count=triangle_count)[0]


_HEADER = "products/newton_schulz.cuh"
GRAM_ALL_REDUCE = DeclaredKernel(
    "gram_all_reduce",
    roles_source("gram_all_reduce", _HEADER, "GramAllReduceRoles", "WORLD_SIZE"),
    out=Map(MAX_RANKS),
    result=Buffer(align=1024),
    **{**owner_sum.FIELDS, "tiles": structure("TriangleTiles", TriangleTiles)},
)

SYMMETRIC_PRODUCT = LocalKernel(
    "symmetric_product",
    roles_source("symmetric_product", _HEADER, "SymmetricProductRoles", local=True),
    **{name: Map() for name in ("a", "b", "c", "residual")},
    tiles=structure("TriangleTiles", TriangleTiles),
    **dict.fromkeys(("n", "k"), U32),
    **dict.fromkeys(("scale", "share"), F32),
)

PARTS_PRODUCT = LocalKernel(
    "parts_product",
    roles_source("parts_product", _HEADER, "PartsProductRoles", "IN_PARTS", "RESULT", local=True),
    **{name: Map() for name in ("a", "b", "c", "c_low", "residual", "residual_low")},
    tiles=structure("GroupedTiles", gemm.GroupedTiles),
    **dict.fromkeys(("n", "k"), U32),
    **dict.fromkeys(("scale", "share"), F32),
)


def _gram_plan(group: Group, m: int, dtype: torch.dtype, tiling: Tiling) -> SumPlan:
    tiles = triangle(tiling, m)
    numbers = -(-tiles.total // group.world_size)
    return SumPlan(m, m, dtype, tiling, tiles, numbers, numbers * tiling.rows, tiling.columns, 2 * numbers * (tiling.rows // 64))


class GramAllReduce(OwnerSum):
    """``call(x)`` for x (m, k): every rank gets the sum over ranks of ``x @ x.T``, (m, m), the same bits on all and exactly symmetric.

    x as ``gemm.aligned`` gives it, bfloat16 or float16; m and the dtype the same on all ranks, k as it comes, but not 0. Half of the tiles
    are computed. A rank rounds its part to the dtype, an owner the sum. The result lies in the arena and is valid until the next call.
    Creating one is collective. Raises UsageError for other dtypes and m of 0."""

    def __init__(self, group: Group, m: int, dtype: torch.dtype, tiling: Tiling | None = None) -> None:
        if dtype not in gemm.ELEMENT_TYPES or not m:
            raise UsageError(
                f"a Gram matrix of {m} rows in {dtype}: expected bfloat16 or float16, and at least one row; convert the matrix"
            )
        plan = _gram_plan(group, m, dtype, tiling or _choose(group, m, gemm.TYPICAL_DEPTH))
        stride = gemm.row_stride(m)
        memory = SumMemory(GRAM_ALL_REDUCE, group, [plan], buffers=1, result=m * stride * gemm.ELEMENT_BYTES)
        places = [TensorPlace(address, dtype, (m, m), (stride, 1)) for address in memory.reserved.addresses("result")]
        super().__init__(memory, plan, gemm.PLAIN, out=[gemm.result_map(place.split(1)) for place in places])
        self.result = memory.reserved.tensor("result", (m, stride), dtype)[:, :m]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.launch(self.plan.rows, x, x.T, {})
        return self.result


class SymmetricProduct:
    """``call(g, scale, share)`` for symmetric g (m, m): ``scale * g @ g + share * g``, exactly symmetric, on one rank alone.

    g as ``gemm.aligned`` gives it, float16 or bfloat16; the sum in float32, rounded once. Half of the tiles are computed."""

    def __init__(self, group: Group, m: int, dtype: torch.dtype, tiling: Tiling | None = None) -> None:
        self.m, self.maps, self.tiling = m, tensor_maps(group), tiling or _choose(group, m, m)
        tiles = triangle(self.tiling, m)
        shape = self.tiling.shape(min(tiles.total * self.tiling.blocks, group.sm_count))
        self._bound = SYMMETRIC_PRODUCT.bind(group, **shape, defines=self.tiling.defines(dtype, "k", "mn"), tiles=tiles, n=m, k=m)

    def __call__(self, g: torch.Tensor, scale: float, share: float) -> torch.Tensor:
        out, maps, tiling = gemm.empty_aligned(self.m, self.m, g), self.maps, self.tiling
        left = maps(g, gemm.operand_box("k", tiling.block_rows))
        right, residual = maps(g, tiling.b_box("mn")), maps(g, (tiling.block_rows, gemm.PANEL))
        self._bound(a=left, b=right, c=maps(out, (64, gemm.PANEL)), residual=residual, scale=scale, share=share)
        return out


Parts = tuple[torch.Tensor, torch.Tensor]
"""A matrix as the sum of two: its rounded value, and what rounding has left."""


class PartsProduct:
    """``call(p, x, scale, share)`` for p (m, m) and x (m, n) in two parts: ``scale * p @ x[0] + share * (x[0] + x[1])``, on one rank alone.

    All as ``gemm.aligned`` gives them, float16 or bfloat16. The result is in two parts, or rounded to ``result``, bfloat16 or float16."""

    def __init__(
        self, group: Group, m: int, n: int, dtype: torch.dtype, result: torch.dtype | None = None, tiling: Tiling | None = None
    ) -> None:
        self.shape, self.result, self.maps = (m, n), result, tensor_maps(group)
        self.tiling = tiling or gemm.choose_tiling(m, n, m, group.sm_count, tilings=gemm.tilings_for(group))
        tiles = self.tiling.grouped(m, n)
        shape = self.tiling.shape(min(tiles.rows * tiles.columns * self.tiling.blocks, group.sm_count))
        defines = self.tiling.defines(dtype, "k", "mn") | {"IN_PARTS": int(result is None), "RESULT": gemm.ELEMENT_TYPES[result or dtype]}
        self._bound = PARTS_PRODUCT.bind(group, **shape, defines=defines, tiles=tiles, n=n, k=m)

    def __call__(self, p: torch.Tensor, x: Parts, scale: float, share: float) -> Parts:
        """Launches the product. Returns both parts of the result; if it has one, the second is the first."""
        maps, tiling = self.maps, self.tiling
        out = gemm.empty_aligned(*self.shape, x[0] if self.result is None else x[0].new_empty(0, dtype=self.result))
        low = gemm.empty_aligned(*self.shape, x[0]) if self.result is None else out
        residuals = [maps(part, (tiling.block_rows, gemm.PANEL)) for part in x]
        self._bound(
            a=maps(p, gemm.operand_box("k", tiling.block_rows)),
            b=maps(x[0], tiling.b_box("mn")),
            c=maps(out, (64, gemm.PANEL)),
            c_low=maps(low, (64, gemm.PANEL)),
            residual=residuals[0],
            residual_low=residuals[1],
            scale=scale,
            share=share,
        )
        return out, low


gram_all_reduce, symmetric_product, parts_product = per_group(GramAllReduce), per_group(SymmetricProduct), per_group(PartsProduct)
"""The group's one of each size. The first call of ``gram_all_reduce`` for a size is collective."""
