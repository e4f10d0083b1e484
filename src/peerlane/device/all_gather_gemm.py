"""Host side of ``peerlane/all_gather_gemm.cuh``: a product whose left operand lies in columns on all ranks, in one launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from peerlane.device import gemm
from peerlane.device.arena import Arena
from peerlane.device.gemm import ELEMENT_BYTES, GroupedTiles, Tiling
from peerlane.device.jit import compile_cubin
from peerlane.device.launch import Kernel, Launch
from peerlane.device.layout import LINE_BYTES
from peerlane.device.roles import SHARED_LIMIT_BYTES, BlockNeeds, require_resident
from peerlane.device.tensor_map import TensorMap, TensorMapSpec, TensorPlace
from peerlane.errors import UsageError

MAX_EPOCH_BLOCKS = 256  # of arena.cuh

IMAGE_ROWS = 128
"""Rows of an image; its columns are a panel's."""
IMAGE_BYTES = IMAGE_ROWS * gemm.PANEL * ELEMENT_BYTES
CARRY_SLOTS = 2
_WAITS = 4
"""How often a tile waits for each other rank, if no wait is for less than so many images: each costs a fence, but a long one comes late."""
_KEPT_LAUNCHES = 512


class Parameters(ctypes.Structure):
    """Mirrors ``peerlane::AllGatherGemmParameters``."""

    _fields_ = (
        ("a", TensorMap),
        ("images", TensorMap),
        ("b", TensorMap),
        ("out", TensorMap),
        ("tiles", GroupedTiles),
        ("sent", GroupedTiles),
        ("m", ctypes.c_uint32),
        ("local_k", ctypes.c_uint32),
        ("waited_panels", ctypes.c_uint32),
        ("communicator_blocks", ctypes.c_uint32),
        ("gathered", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("epochs", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Workspace:
    """Where gathered images, flags and epochs lie in the arena, for left operands of (m, local_k) on each of ``world_size`` ranks."""

    m: int
    local_k: int
    dtype: torch.dtype
    world_size: int

    @property
    def images(self) -> tuple[int, int]:
        """Of one rank's operand: rows and columns of them."""
        return -(-self.m // IMAGE_ROWS), -(-self.local_k // gemm.PANEL)

    @property
    def waited_panels(self) -> int:
        """Images of a row that a tile waits for at a time."""
        return max(_WAITS, -(-self.images[1] // _WAITS))

    @property
    def gathered_bytes(self) -> int:
        return 2 * self.world_size * math.prod(self.images) * IMAGE_BYTES

    @property
    def flags_bytes(self) -> int:
        return math.prod(self.images) * self.world_size * LINE_BYTES

    @property
    def nbytes(self) -> int:
        return self.gathered_bytes + self.flags_bytes + 4 * MAX_EPOCH_BLOCKS + 2 * 1024

    def specs(self, a: TensorPlace, b: TensorPlace, out: TensorPlace, tiling: Tiling) -> dict[str, TensorMapSpec]:
        """All maps of a launch, by the field they go to."""
        return {
            "a": gemm.operand_map(a.split(1), "k", tiling.block_rows),
            "images": gemm.operand_map(a.split(1), "k", IMAGE_ROWS),
            "b": gemm.operand_map(b.split(self.world_size), "mn", tiling.columns // tiling.blocks),
            "out": gemm.result_map(out.split(1)),
        }

    def parameters(self, maps: Mapping[str, TensorMap], plan: Plan, gathered: int, flags: int, epochs: int) -> Parameters:
        """The last three are offsets in the arena."""
        rows, columns = self.images
        group_rows = -(-plan.tiles.group_rows * plan.tiling.rows // IMAGE_ROWS)
        return Parameters(
            **maps,
            tiles=plan.tiles,
            sent=GroupedTiles(rows=rows, columns=columns, group_rows=group_rows),
            m=self.m,
            local_k=self.local_k,
            waited_panels=self.waited_panels,
            communicator_blocks=plan.communicator_blocks,
            gathered=gathered,
            flags=flags,
            epochs=epochs,
        )


@dataclass(frozen=True)
class Plan:
    """One launch: the first ``communicator_blocks`` blocks of the grid communicate, the others compute. If there are none of the first, a
    warp of every block communicates."""

    tiling: Tiling
    tiles: GroupedTiles
    grid: int
    communicator_blocks: int

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.tiling)


def shared_bytes(tiling: Tiling) -> int:
    """``sizeof(RoleMemory)``: the communicator's images beside what a product takes."""
    return tiling.shared_bytes + CARRY_SLOTS * IMAGE_BYTES


def with_room(tiling: Tiling) -> Tiling:
    """With as many slots as the communicator's images leave room for."""
    while shared_bytes(tiling) > SHARED_LIMIT_BYTES:
        tiling = replace(tiling, slots=tiling.slots - 1)
    return tiling


def plan(m: int, n: int, k: int, sm_count: int, communicator_blocks: int = 0) -> Plan:
    """The launch for an (m, n) result of ``k`` in all."""
    tiling = with_room(gemm.choose_tiling(m, n, k, sm_count - communicator_blocks))
    communicators = -(-communicator_blocks // tiling.blocks) * tiling.blocks
    computing = tiling.whole(sm_count - communicators)
    rows, columns = tiling.grid(m, n)
    # As many row panels at a time as keep all compute blocks busy: rows are used in the order in which they come.
    tiles = GroupedTiles(rows=rows, columns=columns, group_rows=min(rows, -(-computing // (tiling.blocks * columns))))
    # Where few compute, all blocks communicate nevertheless.
    needed = rows * columns * tiling.blocks if communicators else computing
    return Plan(tiling, tiles, communicators + min(needed, computing), communicators)


SOURCE = r"""
#include <peerlane/all_gather_gemm.cuh>

using Shape = SHAPE;
using Fused = peerlane::AllGatherGemm<Shape, WORLD_SIZE>;

extern "C" __global__ void __cluster_dims__(Shape::cluster_blocks) __launch_bounds__(Shape::roles.threads(), 1) all_gather_gemm(
    const __grid_constant__ Fused::Parameters parameters, const __grid_constant__ peerlane::Arena arena) {
    peerlane::run_roles(Fused(parameters, arena), parameters.communicator_blocks);
}
"""


class AllGatherGemm:
    """``call(a, b)`` for one shape of left operand: every rank gets ``[a_0 | a_1 | ...] @ b`` with its own b.

    a (m, local_k), b (W local_k, n): bfloat16 or float16, as ``gemm.aligned`` gives them; m, local_k and the dtype the same on all ranks.
    The result is laid out in the same way. Creating one is collective. Calls in one stream need no barrier between them and can be
    captured in a graph. ``communicator_blocks`` of the blocks only send; with 0, the default, a spare warp of every block does."""

    def __init__(
        self,
        m: int,
        local_k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 10.0,
        communicator_blocks: int = 0,
    ) -> None:
        world_size = dist.get_world_size(group)
        if dtype not in gemm.ELEMENT_TYPES or not m * local_k:
            raise UsageError(
                f"all-gather of ({m}, {local_k}) in {dtype} and GEMM: expected elements, and bfloat16 or float16; convert the operands"
            )
        self.communicator_blocks = communicator_blocks
        self.workspace = Workspace(m, local_k, dtype, world_size)
        self.arena = Arena(self.workspace.nbytes, group, timeout_s=timeout_s)
        self.gathered = self.arena.take(self.workspace.gathered_bytes, align=1024)
        self.flags = self.arena.take(self.workspace.flags_bytes)
        self.epochs = self.arena.take(4 * MAX_EPOCH_BLOCKS)
        self.arena.seal()
        self._launches: dict[tuple[int, int, int, int], Launch] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = gemm.empty_aligned(a.shape[0], b.shape[1], a)
        key = (a.data_ptr(), b.data_ptr(), out.data_ptr(), b.shape[1])
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) == _KEPT_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = self.bind(a, b, out)
        launch()
        return out

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        """The launch for these tensors. It holds their addresses, not them."""
        space = self.workspace
        if (
            tuple(a.shape) != (space.m, space.local_k)
            or b.shape[0] != space.world_size * space.local_k
            or {a.dtype, b.dtype} != {space.dtype}
        ):
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected ({space.m}, {space.local_k}) and "
                f"({space.world_size * space.local_k}, n) in {space.dtype}; create an AllGatherGemm for each size"
            )
        chosen = plan(space.m, b.shape[1], b.shape[0], self.arena.sm_count, self.communicator_blocks)
        tiling = chosen.tiling
        cubin = compile_cubin(SOURCE, defines={**tiling.defines(a.dtype, "k", "mn"), "WORLD_SIZE": space.world_size})
        kernel = Kernel(cubin, "all_gather_gemm", on_failure=self.arena.raise_fault)
        needs = BlockNeeds(tiling.threads, kernel.attributes()["registers"], chosen.shared_bytes)
        require_resident("all_gather_gemm", chosen.grid, needs, self.arena.sm_count)
        specs = space.specs(TensorPlace.of(a), TensorPlace.of(b), TensorPlace.of(out), tiling)
        maps = {name: spec.encode() for name, spec in specs.items()}
        parameters = space.parameters(maps, chosen, self.gathered, self.flags, self.epochs)
        return kernel.bind(chosen.grid, tiling.threads, (parameters, self.arena.view), shared_bytes=chosen.shared_bytes)
