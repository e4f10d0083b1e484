"""Host side of ``peerlane/perceptron.cuh``: a perceptron of two layers whose input lies in columns on all ranks, in one launch."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from peerlane.device.host.arena import Arena
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.layout import LINE_BYTES
from peerlane.device.host.roles import BlockNeeds, require_resident
from peerlane.device.host.tensor_map import TensorMap, TensorPlace
from peerlane.device.host.tensor_maps import TensorMaps
from peerlane.device.products import all_gather_gemm, gemm
from peerlane.device.products.all_gather_gemm import MAX_EPOCH_BLOCKS, Workspace, choose_pieces, plan
from peerlane.device.products.gemm import ELEMENT_BYTES, Activation, Epilogue, GroupedTiles, Tiling

_TILINGS = [tiling for tiling in gemm.TILINGS if tiling.blocks == 1]
_LEAST_PIECE_ROWS = 8


class Parameters(ctypes.Structure):
    """Mirrors ``peerlane::PerceptronParameters``."""

    _fields_ = (
        ("first", all_gather_gemm.Parameters),
        ("hidden", TensorMap),
        ("b", TensorMap),
        ("out", TensorMap),
        ("tiles", GroupedTiles),
        ("inner", ctypes.c_uint32),
        ("done", ctypes.c_uint64),
        ("padding", ctypes.c_uint32 * 10),
    )


SOURCE = r"""
#include <peerlane/perceptron.cuh>

using Shape = SHAPE;
using Fused = peerlane::Perceptron<Shape, WORLD_SIZE>;

extern "C" __global__ void __launch_bounds__(Shape::roles.threads(), 1) perceptron(
    const __grid_constant__ peerlane::PerceptronParameters parameters, const __grid_constant__ peerlane::Arena arena) {
    peerlane::run_roles(Fused(parameters, arena));
}
"""


def choose_tiling(m: int, inner: int, k: int, sm_count: int) -> Tiling | None:
    """Tiles for (m, inner) results of the first product, all of them resident; None where it is too large for that."""
    best = gemm.choose_tiling(m, inner, k, sm_count, tilings=_TILINGS)
    rows, columns = best.grid(m, inner)
    return best if rows * columns <= sm_count else None


class Perceptron:
    """``call(x, w1, w2)`` for one shape: ``activation(A w1) w2`` for this rank's m rows of A = [x_0 | x_1 | ...].

    x (W m, local_k), w1 (W local_k, inner), w2 (inner, n): bfloat16 or float16, as ``gemm.aligned`` gives them. Shapes and dtype are the
    same on all ranks. The result is laid out in the same way. Creating one is collective. Calls in one stream need no barrier between them
    and can be captured in a graph."""

    def __init__(self, group: Group, sizes: tuple[int, int, int, int], dtype: torch.dtype, activation: Activation, tiling: Tiling) -> None:
        m, local_k, inner, n = sizes
        self.group, self.m, self.n, self.tiling, self.maps = group, m, n, tiling, TensorMaps(group)
        world = group.world_size
        pieces = choose_pieces(m, local_k, world)
        # Where they are few, a piece for every block: a warp's loads and stores take longer than a signal.
        while pieces.rows > _LEAST_PIECE_ROWS and 2 * pieces.count <= group.sm_count:
            pieces = replace(pieces, rows=pieces.rows // 2)
        space = Workspace(pieces, dtype, world, scatters=True)
        first = plan(pieces, inner, world * local_k, group.sm_count, tilings=[tiling])
        second = tiling.grouped(m, n)
        hidden_bytes = m * gemm.row_stride(inner) * ELEMENT_BYTES
        flag_bytes = first.tiles.rows * tiling.groups * first.tiles.columns * world * LINE_BYTES
        self.arena = Arena(space.nbytes + hidden_bytes + flag_bytes + 2 * 1024, group, name="perceptron")
        gathered_at = self.arena.take(space.gathered_bytes, align=1024)
        hidden_at = self.arena.take(hidden_bytes, align=1024)
        flags, epochs = self.arena.take(space.flags_bytes), self.arena.take(4 * MAX_EPOCH_BLOCKS)
        done = self.arena.take(flag_bytes)
        self.arena.seal()
        base = self.arena.view.base[self.arena.rank]
        hidden = TensorPlace(base + hidden_at, dtype, (m, inner), (gemm.row_stride(inner), 1)).split(1)
        maps = {"gathered": group.encode(space.gathered_map(base + gathered_at, tiling)), "out": group.encode(gemm.result_map(hidden))}
        self._arguments = Parameters(
            first=space.parameters(maps, first, 0, gathered_at, flags, epochs),
            hidden=group.encode(gemm.operand_map(hidden, "k", tiling.block_rows)),
            tiles=second,
            inner=inner,
            done=done,
        )
        defines = {**tiling.defines(dtype, "k", "mn", Epilogue(activation)), "WORLD_SIZE": world}
        kernel = group.kernel(SOURCE, "perceptron", defines=defines, on_failure=self.arena.raise_fault)
        grid = min(group.sm_count, max(first.grid, second.rows * second.columns))
        needs = BlockNeeds(tiling.threads, kernel.attributes()["registers"], tiling.shared_bytes)
        require_resident("perceptron", grid, needs, group.sm_count)
        self._launch = kernel.bind(grid, tiling.threads, (self._arguments, self.arena.view), shared_bytes=tiling.shared_bytes)

    def __call__(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        out, maps, world, tiling = gemm.empty_aligned(self.m, self.n, x), self.maps, self.group.world_size, self.tiling
        first, second, columns = self._arguments.first, self._arguments, gemm.operand_box("mn", tiling.columns)
        first.local, first.a = self.group.address(x), maps(x, gemm.operand_box("k", tiling.block_rows), world)
        first.b, second.b, second.out = maps(w1, columns, world), maps(w2, columns), maps(out, (64, gemm.PANEL))
        self._launch()
        return out


@per_group
def perceptron(
    group: Group, m: int, local_k: int, inner: int, n: int, dtype: torch.dtype, activation: Activation = "silu"
) -> Perceptron | None:
    """The group's one :class:`Perceptron` of this size, or None where its first product is more than a wave of tiles. The first call is
    collective."""
    tiling = choose_tiling(m, inner, group.world_size * local_k, group.sm_count)
    return None if tiling is None else Perceptron(group, (m, local_k, inner, n), dtype, activation, tiling)
