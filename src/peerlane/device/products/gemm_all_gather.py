"""Host side of ``peerlane/products/gemm_all_gather.cuh``: products of all ranks side by side, on every rank, in one launch."""

import functools
from collections.abc import Sequence
from typing import Unpack

import torch
import torch.distributed as dist

from peerlane.device.host.declare import BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Map, roles_source
from peerlane.device.host.group import MAX_RANKS, Group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_map import TensorMapSpec
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm
from peerlane.device.products.gathering import Memory
from peerlane.device.products.gemm import Epilogue, Major, Tiling
from peerlane.errors import UsageError

SOURCE = roles_source("gemm_all_gather", "products/gemm_all_gather.cuh", "GemmAllGatherRoles", "WORLD_SIZE")
GEMM_ALL_GATHER = DeclaredKernel(
    "gemm_all_gather", SOURCE, **gemm.FIELDS, out=Map(MAX_RANKS), result=Buffer(align=1024), flags=Flags(), epochs=Epochs()
)


def _memory(group: Group, m: int, n: int, tilings: Sequence[Tiling]) -> Memory:
    """Collective: for all sizes of up to ``m`` rows."""
    grids = [(tiling, *tiling.grid(m, n)) for tiling in tilings]
    flags = 1 + max(rows * columns * (tiling.rows // 64) for tiling, rows, columns in grids)
    sizes = {"result": group.world_size * m * gemm.row_stride(n) * gemm.ELEMENT_BYTES, "flags": flags}
    return Memory(GEMM_ALL_GATHER.reserve(group, sizes=sizes), m)


class GemmAllGather:
    """``call(a, b)`` for one shape: every rank gets ``[a_0 @ b_0 | a_1 @ b_1 | ...]`` (m, W n), the same bits on all.

    a (m, k), as ``gemm.aligned`` gives it, and b (k, n), as it lies: bfloat16 or float16; m, n and the dtype the same on all ranks, k as it
    comes, but not 0. The epilogue's bias (n) and residual (m, n) are of this rank's columns. The result lies in the arena and is valid
    until the next call with the same memory; if n is no multiple of 8, it is a copy. Creating one is collective, unless its ``memory`` is
    given. Calls in one stream need no barrier between them and can be captured in a graph."""

    def __init__(
        self,
        m: int,
        n: int,
        dtype: torch.dtype,
        group: Group | dist.ProcessGroup | None = None,
        *,
        epilogue: Epilogue = gemm.PLAIN,
        tiling: Tiling | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.group, self.shape, self.dtype, self.epilogue = group_of(group), (m, n), dtype, epilogue
        world_size, sm_count = self.group.world_size, self.group.sm_count
        if dtype not in gemm.ELEMENT_TYPES or not m * n:
            raise UsageError(
                f"GEMM of ({m}, {n}) in {dtype} and all-gather: "
                "expected bfloat16 or float16, and no size of 0; use a product and a collective otherwise"
            )
        tilings = gemm.tilings_for(self.group, epilogue.batch_invariant)
        self.tiling = tiling = tiling or gemm.choose_tiling(m, n, gemm.TYPICAL_DEPTH, sm_count, tilings=tilings)
        self.maps, self.memory = tensor_maps(self.group), memory or _memory(self.group, m, n, [tiling])
        tiles, stride, reserved = tiling.grouped(m, n), gemm.row_stride(n), self.memory.reserved
        # Blocks of columns side by side where they begin at multiples of 16 bytes, one behind the other elsewhere.
        strides = (n, world_size * n, 1) if n == stride else (self.memory.capacity * stride, stride, 1)
        box, addresses = (1, 64, gemm.PANEL), reserved.addresses("result")

        def bind(major: Major) -> BoundKernel:
            return reserved.bind(
                **tiling.shape(min(tiles.rows * tiles.columns * tiling.blocks, sm_count)),
                resident=True,
                defines=tiling.defines(dtype, "k", major, epilogue),
                tiles=tiles,
                n=n,
                out=[TensorMapSpec(address, dtype, (world_size, m, n), strides, box) for address in addresses],
            )

        self._bind = functools.cache(bind)
        self._bind("mn")
        flat = reserved.tensor("result", (world_size * self.memory.capacity * stride,), dtype)
        self.result = flat.as_strided((m, world_size, n), (strides[1], strides[0], 1), flat.storage_offset())

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.memory.reserved.close()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **terms: Unpack[gemm.Terms]) -> torch.Tensor:
        gemm.check_operands(a, b)
        (m, n), tiling = self.shape, self.tiling
        if (a.shape[0], b.shape[1], a.dtype) != (m, n, self.dtype):
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected {m} rows, {n} columns, {self.dtype}; create a "
                "GemmAllGather for each size"
            )
        last = self.epilogue.fields(self.maps, self.shape, tiling.block_rows, **terms)
        right, major = gemm.stored(b)
        self._bind(major)(
            a=self.maps(a, gemm.operand_box("k", tiling.block_rows)), b=self.maps(right, tiling.b_box(major)), k=a.shape[1], **last
        )
        return self.result.reshape(m, -1)


gemm_all_gather, memory_of = gemm.kept_products(
    GemmAllGather, "gemm_all_gather", lambda group, m, n, dtype: _memory(group, m, n, gemm.tilings_for(group))
)
"""A result is valid until the next call with as many columns."""
