"""Host side of ``peerlane/products/perceptron.cuh``: a perceptron of two layers whose input lies in columns on all ranks, in one launch."""

from dataclasses import replace

import torch

from peerlane.device.host.declare import Buffer, DeclaredKernel, Flags, Map, Reserved, roles_source, structure
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.tensor_map import TensorPlace
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import all_gather_gemm, gemm
from peerlane.device.products.capacity import capacity
from peerlane.device.products.gathering import Workspace, arena_sizes, choose_pieces, most_pieces, plan
from peerlane.device.products.gemm import ELEMENT_BYTES, Activation, Epilogue, GroupedTiles, Tiling

_TILINGS = [tiling for tiling in gemm.TILINGS if tiling.blocks == 1]
_LEAST_PIECE_ROWS = 8


SOURCE = roles_source("perceptron", "products/perceptron.cuh", "PerceptronRoles", "WORLD_SIZE", clusters=False)
PERCEPTRON = DeclaredKernel(
    "perceptron", SOURCE, **all_gather_gemm.FIELDS, hidden=Map(), second_b=Map(), second_out=Map(),
    second_tiles=structure("GroupedTiles", GroupedTiles), hidden_memory=Buffer(align=1024), done=Flags(),
)  # fmt: skip


def choose_tiling(m: int, inner: int, k: int, sm_count: int) -> Tiling | None:
    """Tiles for (m, inner) results of the first product, all of them resident; None where it is too large for that."""
    best = gemm.choose_tiling(m, inner, k, sm_count, tilings=_TILINGS)
    rows, columns = best.grid(m, inner)
    return best if rows * columns <= sm_count else None


class Perceptron:
    """``call(x, w1, w2)`` for one shape: ``activation(A w1) w2`` for this rank's m rows of A = [x_0 | x_1 | ...].

    x (W m, local_k), w1 (W local_k, inner), w2 (inner, n): bfloat16 or float16, as ``gemm.aligned`` gives them. Shapes and dtype are the
    same on all ranks. The result is laid out in the same way. Creating the first of a capacity is collective. Calls in one stream need no
    barrier between them and can be captured in a graph."""

    def __init__(self, group: Group, sizes: tuple[int, int, int, int], dtype: torch.dtype, activation: Activation, tiling: Tiling) -> None:
        m, local_k, inner, n = sizes
        self.group, self.m, self.n, self.tiling, self.maps = group, m, n, tiling, tensor_maps(group)
        world, room = group.world_size, capacity(m)
        pieces = choose_pieces(m, local_k, world)
        # Where they are few, a piece for every block: a warp's loads and stores take longer than a signal.
        while pieces.rows > _LEAST_PIECE_ROWS and 2 * pieces.count <= group.sm_count:
            pieces = replace(pieces, rows=pieces.rows // 2)
        space = Workspace(pieces, room, dtype, world, scatters=True)
        first = plan(pieces, inner, world * local_k, group.sm_count, tilings=[tiling])
        second, stride, memory = tiling.grouped(m, n), gemm.row_stride(inner), _memory(group, room, local_k, inner)
        gathered_at, hidden_at = (memory.addresses(name)[group.rank] for name in ("gathered_memory", "hidden_memory"))
        hidden = TensorPlace(hidden_at, dtype, (m, inner), (stride, 1)).split(1)
        self.bound = memory.bind(
            **tiling.shape(min(group.sm_count, max(first.grid, second.rows * second.columns))),
            resident=True,
            defines=tiling.defines(dtype, "k", "mn", Epilogue(activation)),
            **space.fields(first),
            n=inner,
            gathered=space.gathered_map(gathered_at, tiling),
            out=gemm.result_map(hidden),
            hidden=gemm.operand_map(hidden, "k", tiling.block_rows),
            second_tiles=second,
        )

    def __call__(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        out, maps, world, tiling = gemm.empty_aligned(self.m, self.n, x), self.maps, self.group.world_size, self.tiling
        columns = gemm.operand_box("mn", tiling.columns)
        self.bound(
            a=maps(x, gemm.operand_box("k", tiling.block_rows), world),
            local=x,
            b=maps(w1, columns, world),
            second_b=maps(w2, columns),
            second_out=maps(out, (64, gemm.PANEL)),
        )
        return out


@per_group
def perceptron(
    group: Group, m: int, local_k: int, inner: int, n: int, dtype: torch.dtype, activation: Activation = "silu"
) -> Perceptron | None:
    """The group's one :class:`Perceptron` of this size, or None where its first product is more than a wave of tiles. The first call of a
    capacity is collective."""
    tiling = choose_tiling(m, inner, group.world_size * local_k, group.sm_count)
    return None if tiling is None else Perceptron(group, (m, local_k, inner, n), dtype, activation, tiling)


@per_group
def _memory(group: Group, m: int, local_k: int, inner: int) -> Reserved:
    """Memory for all sizes of up to ``m`` rows. Tiles of the first product are one wave, with two flags each at most."""
    pieces = max(most_pieces(m, local_k, group.world_size), group.sm_count)
    hidden = {"hidden_memory": m * gemm.row_stride(inner) * ELEMENT_BYTES, "done": 2 * group.sm_count}
    return PERCEPTRON.reserve(group, sizes={**arena_sizes(m, local_k, group.world_size, pieces), **hidden})
