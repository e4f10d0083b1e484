"""Host side of ``peerlane/gemm_reduce_scatter.cuh``: rows of a sum of products over ranks, in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from peerlane.device import gemm
from peerlane.device.arena import Arena
from peerlane.device.gemm import ELEMENT_BYTES, GroupedTiles, Tiling
from peerlane.device.group import MAX_RANKS, DeviceLaunch, Group, group_of, per_group
from peerlane.device.layout import LINE_BYTES
from peerlane.device.roles import BlockNeeds, require_resident
from peerlane.device.tensor_map import TensorMap, TensorMapSpec, TensorPlace
from peerlane.errors import UsageError

MAX_EPOCH_BLOCKS = 256  # of arena.cuh

# Tiles are chosen for this depth, whatever k is: k may differ from rank to rank, the tiles may not.
_TYPICAL_DEPTH = 2048
_KEPT_LAUNCHES = 512


class Parameters(ctypes.Structure):
    """Mirrors ``peerlane::GemmReduceScatterParameters``."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("out", TensorMap),
        ("partials", TensorMap),
        ("slots", TensorMap * MAX_RANKS),
        ("tiles", GroupedTiles),
        ("k", ctypes.c_uint32),
        ("local_rows", ctypes.c_uint32),
        ("lag", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("epochs", ctypes.c_uint64),
        ("padding", ctypes.c_uint32 * 6),
    )


@dataclass(frozen=True)
class Workspace:
    """Where slots, flags and epochs lie in the arena (offsets in bytes), for results of (local_rows, n) on each of ``world_size`` ranks."""

    local_rows: int
    n: int
    dtype: torch.dtype
    world_size: int
    tiling: Tiling

    @property
    def slots_bytes(self) -> int:
        return 2 * self.world_size * self.local_rows * gemm.row_stride(self.n) * ELEMENT_BYTES

    @property
    def flags_bytes(self) -> int:
        rows, columns = self.tiling.grid(self.local_rows, self.n)
        return rows * columns * self.tiling.groups * self.tiling.blocks * self.world_size * LINE_BYTES

    @property
    def lag(self) -> int:
        """Own tiles come about a wave of tiles behind the others' of their number, which are on their way meanwhile."""
        return -(-gemm.TYPICAL_SM_COUNT // (self.tiling.blocks * self.world_size))

    @property
    def nbytes(self) -> int:
        return self.slots_bytes + self.flags_bytes + 4 * MAX_EPOCH_BLOCKS + 2 * 1024

    def slots_map(self, address: int, box_rows: int) -> TensorMapSpec:
        """The map of a rank's slots, which begin at ``address``: (2 W, local_rows, n)."""
        shape = (2 * self.world_size, self.local_rows, self.n)
        stride = gemm.row_stride(self.n)
        return TensorMapSpec(address, self.dtype, shape, (self.local_rows * stride, stride, 1), (1, box_rows, gemm.PANEL))

    def specs(self, a: TensorPlace, b: TensorPlace, out: TensorPlace, bases: Sequence[int], rank: int) -> dict[str, TensorMapSpec]:
        """All maps of a launch, by the field they go to; ``bases`` are the addresses of every rank's slots."""
        return {
            "a": gemm.operand_map(a.split(1), "k", self.tiling.block_rows),
            "b": gemm.operand_map(b.split(1), "mn", self.tiling.columns // self.tiling.blocks),
            "out": gemm.result_map(out.split(1)),
            "partials": self.slots_map(bases[rank], self.tiling.block_rows),
            **{f"slots.{peer}": self.slots_map(base, 64) for peer, base in enumerate(bases)},
        }

    def parameters(self, maps: Mapping[str, TensorMap], k: int, flags: int, epochs: int) -> Parameters:
        return Parameters(
            **{name: maps[name] for name in ("a", "b", "out", "partials")},
            slots=(TensorMap * MAX_RANKS)(*(maps[f"slots.{peer}"] for peer in range(self.world_size))),
            tiles=self.tiling.grouped(self.local_rows, self.n, parts=self.world_size),
            k=k,
            local_rows=self.local_rows,
            lag=self.lag,
            flags=flags,
            epochs=epochs,
        )


SOURCE = r"""
#include <peerlane/gemm_reduce_scatter.cuh>

using Shape = SHAPE;
using Fused = peerlane::GemmReduceScatter<Shape, WORLD_SIZE>;

extern "C" __global__ void __cluster_dims__(Shape::cluster_blocks) __launch_bounds__(Shape::roles.threads(), 1) gemm_reduce_scatter(
    const __grid_constant__ Fused::Parameters parameters, const __grid_constant__ peerlane::Arena arena) {
    peerlane::run_roles(Fused(parameters, arena));
}
"""


class GemmReduceScatter:
    """``call(a, b)`` for one shape of result: rank r gets rows [r m / W, (r + 1) m / W) of the sum over ranks of ``a @ b``.

    a (m, k), b (k, n): bfloat16 or float16, as ``gemm.aligned`` gives them; m divisible by the world size; m, n and the dtype the same on
    all ranks, k as it comes, but not 0. The result is laid out in the same way. Creating one is collective. Calls in one stream need no
    barrier between them and can be captured in a graph."""

    def __init__(
        self, m: int, n: int, dtype: torch.dtype, group: Group | dist.ProcessGroup | None = None, *, timeout_s: float = 10.0
    ) -> None:
        self.group = group_of(group)
        world_size = self.group.world_size
        if m % world_size or dtype not in gemm.ELEMENT_TYPES:
            raise UsageError(
                f"GEMM and reduce-scatter of ({m}, {n}) in {dtype} over {world_size} ranks: expected m divisible by the ranks, and "
                "bfloat16 or float16; pad the rows with zeros or convert the operands"
            )
        tiling = gemm.choose_tiling(m // world_size, n, _TYPICAL_DEPTH, gemm.TYPICAL_SM_COUNT, parts=world_size)
        self.workspace = Workspace(m // world_size, n, dtype, world_size, tiling)
        self.arena = Arena(self.workspace.nbytes, self.group, timeout_s=timeout_s)
        self.slots = self.arena.take(self.workspace.slots_bytes, align=1024)
        self.flags = self.arena.take(self.workspace.flags_bytes)
        self.epochs = self.arena.take(4 * MAX_EPOCH_BLOCKS)
        self.arena.seal()
        defines = {**tiling.defines(dtype, "k", "mn"), "WORLD_SIZE": world_size}
        self.kernel = self.group.kernel(SOURCE, "gemm_reduce_scatter", defines=defines, on_failure=self.arena.raise_fault)
        rows, columns = tiling.grid(m // world_size, n)
        self.grid = tiling.whole(min(world_size * rows * columns * tiling.blocks, self.arena.sm_count))
        needs = BlockNeeds(tiling.threads, self.kernel.attributes()["registers"], tiling.shared_bytes)
        require_resident("gemm_reduce_scatter", self.grid, needs, self.arena.sm_count)
        self._launches: dict[tuple[int, int, int, int], DeviceLaunch] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = gemm.empty_aligned(self.workspace.local_rows, self.workspace.n, a)
        key = self.group.address(a), self.group.address(b), self.group.address(out), a.shape[1]
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) == _KEPT_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = self.bind(a, b, out)
        launch()
        return out

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> DeviceLaunch:
        """The launch for these tensors. It holds their addresses, not them."""
        gemm.check_operands(a, b)
        space = self.workspace
        if a.shape[0] != space.local_rows * space.world_size or b.shape[1] != space.n or a.dtype != space.dtype:
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected {space.local_rows * space.world_size} rows, "
                f"{space.n} columns, {space.dtype}; create a GemmReduceScatter for each size"
            )
        bases = [self.arena.view.base[rank] + self.slots for rank in range(space.world_size)]
        a_place, b_place, out_place = (TensorPlace.of(tensor, self.group) for tensor in (a, b, out))
        maps = {name: self.group.encode(spec) for name, spec in space.specs(a_place, b_place, out_place, bases, self.arena.rank).items()}
        arguments = space.parameters(maps, a.shape[1], self.flags, self.epochs), self.arena.view
        tiling = space.tiling
        return self.kernel.bind(self.grid, tiling.threads, arguments, shared_bytes=tiling.shared_bytes, cluster=tiling.blocks)


@per_group
def gemm_reduce_scatter(group: Group, m: int, n: int, dtype: torch.dtype) -> GemmReduceScatter:
    """The group's one :class:`GemmReduceScatter` of this size; the first call is collective."""
    return GemmReduceScatter(m, n, dtype, group)
