"""Host side of ``peerlane/products/all_gather_gemm.cuh``: a product whose left operand lies in columns on all ranks, in one launch."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Unpack

import torch
import torch.distributed as dist

from peerlane.device.host.declare import (
    U32,
    U64,
    BoundKernel,
    BoundLaunches,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    Map,
    Pointer,
    roles_source,
    structure,
)
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.tensor_maps import tensor_maps
from peerlane.device.products import gemm
from peerlane.device.products.capacity import capacity, with_room
from peerlane.device.products.gathering import Memory, Plan, Workspace, arena_sizes, choose_pieces, most_pieces, plan
from peerlane.device.products.gemm import Epilogue, GroupedTiles, Tiling
from peerlane.errors import UsageError

COMMUNICATOR_BLOCKS = (8, 16)
"""What is tried beside a warp of every block."""


FIELDS: Mapping[str, Field] = {
    **gemm.FIELDS,
    **{name: Map() for name in ("gathered", "out")},
    "pieces": structure("GroupedTiles", GroupedTiles),
    **dict.fromkeys(("m", "row_bytes", "header_bytes", "piece_rows", "piece_columns", "communicator_blocks"), U32),
    "slot_bytes": U64,
    "local": Pointer("const char*", strided=True),
    "gathered_memory": Buffer(align=1024),
    "flags": Flags(),
    "epochs": Epochs(),
}
"""The fields of every kernel whose left operand is gathered."""


SOURCE = roles_source(
    "all_gather_gemm", "products/all_gather_gemm.cuh", "AllGatherGemmRoles", "WORLD_SIZE", "SCATTERS", communicator_blocks=True
)
ALL_GATHER_GEMM = DeclaredKernel("all_gather_gemm", SOURCE, **FIELDS)


def _memory(group: Group, m: int, local_k: int, communicator_blocks: Sequence[int]) -> Memory:
    """Collective: for all sizes of up to ``m`` rows, sent by any of these numbers of blocks."""
    pieces = max(most_pieces(m, local_k, group.world_size, blocks) for blocks in communicator_blocks)
    return Memory(ALL_GATHER_GEMM.reserve(group, sizes=arena_sizes(m, local_k, group.world_size, pieces)), m)


class AllGatherGemm:
    """``call(a, b)`` for one shape of left operand: every rank gets ``[a_0 | a_1 | ...] @ b`` with its own b. With ``scatters`` every rank
    has W m rows, and rank r gets rows [r m, (r + 1) m) of that product.

    a (m, local_k), as ``gemm.aligned`` gives it, and b (W local_k, n), as it lies (``gemm.stored``): bfloat16 or float16; m, local_k and
    the dtype the same on all ranks. The result is laid out as ``gemm.aligned`` does. Creating one is collective, unless its ``memory`` is
    given. Calls in one stream need no barrier between them and can be captured in a graph. ``communicator_blocks`` of the blocks only send;
    with 0, the default, a spare warp of every block does. The epilogue's bias (n), residual (m, n) and scale are this rank's."""

    def __init__(
        self,
        m: int,
        local_k: int,
        dtype: torch.dtype,
        group: Group | dist.ProcessGroup | None = None,
        *,
        communicator_blocks: int = 0,
        scatters: bool = False,
        epilogue: Epilogue = gemm.PLAIN,
        tiling: Tiling | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.group, self.epilogue, self._plain = group_of(group), epilogue, epilogue == gemm.PLAIN
        self.tilings = gemm.tilings_for(self.group, epilogue.batch_invariant) if tiling is None else [tiling]
        self.maps = tensor_maps(self.group)
        world_size = self.group.world_size
        if scatters and communicator_blocks:
            raise UsageError(f"an all-to-all by {communicator_blocks} communicator blocks: expected 0; a warp of every block sends")
        if dtype not in gemm.ELEMENT_TYPES or not m * local_k:
            raise UsageError(
                f"all-gather of ({m}, {local_k}) in {dtype} and GEMM: "
                "expected bfloat16 or float16, and no size of 0; use a product and a collective otherwise"
            )
        self.communicator_blocks = communicator_blocks
        self.memory = memory or _memory(self.group, m, local_k, [communicator_blocks])
        pieces = choose_pieces(m, local_k, world_size, communicator_blocks)
        self.workspace = Workspace(pieces, self.memory.capacity, dtype, world_size, scatters)
        self._launches = BoundLaunches[Hashable]()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **terms: Unpack[gemm.Terms]) -> torch.Tensor:
        out = gemm.empty_aligned(self.workspace.m, b.shape[1], a)
        right, major = self._stored(b)
        b = right if major == "mn" else right.T
        key = self.group.address(a), self.group.address(b), self.group.address(out), b.shape[1], b.stride()
        launch = self._launches.get(key, lambda: self.bind(a, b, out))
        if terms or not self._plain:
            rows = self.plan_for(b).tiling.block_rows
            launch.set(**self.epilogue.fields(self.maps, (self.workspace.m, b.shape[1]), rows, **terms))
        launch()
        return out

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.memory.reserved.close()

    def _stored(self, b: torch.Tensor) -> tuple[torch.Tensor, gemm.Major]:
        """Returns the right operand as it lies, or a copy, for copies of every rank's part of it."""
        right, major = gemm.stored(b)
        if major == "k" and self.workspace.local_k % 8:  # parts begin between multiples of 16 bytes
            return gemm.aligned(b), "mn"
        return right, major

    def plan_for(self, b: torch.Tensor) -> Plan:
        return plan(self.workspace.pieces, b.shape[1], b.shape[0], self.group.sm_count, self.communicator_blocks, self.tilings)

    def bind(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> BoundKernel:
        """The launch for these tensors. It holds their addresses, not them."""
        space = self.workspace
        if (
            tuple(a.shape) != (space.a_rows, space.local_k)
            or b.shape[0] != space.world_size * space.local_k
            or {a.dtype, b.dtype} != {space.dtype}
        ):
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)} in {a.dtype}: expected ({space.a_rows}, {space.local_k}) and "
                f"({space.world_size * space.local_k}, n) in {space.dtype}; create an AllGatherGemm for each size"
            )
        chosen, (right, major) = self.plan_for(b), self._stored(b)
        tiling, place = chosen.tiling, self.group.place
        gathered = self.memory.reserved.addresses("gathered_memory")[self.group.rank]
        return self.memory.reserved.bind(
            **tiling.shape(chosen.grid),
            resident=True,
            defines={**tiling.defines(a.dtype, "k", major, self.epilogue), "SCATTERS": int(space.scatters)},
            **space.fields(chosen),
            **space.specs(place(a), place(right), place(out), gathered, tiling, major),
            n=b.shape[1],
            local=a,
        )


@per_group
def all_gather_gemm(
    group: Group, m: int, local_k: int, dtype: torch.dtype, scatters: bool = False, epilogue: Epilogue = gemm.PLAIN, n: int = 0
) -> AllGatherGemm:
    """The group's one :class:`AllGatherGemm` of this kind and size; the first call of more rows than all before is collective. It is
    tuned for ``n`` columns, the same on all ranks; 0: it follows the model."""
    tuned = n and not epilogue.batch_invariant  # communicator blocks change the order of k
    blocks, tiling = _fastest(group, capacity(m), local_k, dtype, scatters, n) if tuned else (0, None)
    memory = with_room(memory_of, group, m, local_k, scatters)
    return AllGatherGemm(
        m, local_k, dtype, group, communicator_blocks=blocks, scatters=scatters, epilogue=epilogue, tiling=tiling, memory=memory
    )


@per_group
def memory_of(group: Group, m: int, local_k: int, scatters: bool) -> Memory:
    """Collective: memory for all sizes of up to ``m`` rows."""
    return _memory(group, m, local_k, [0] if scatters else [0, *COMMUNICATOR_BLOCKS])


@per_group
def _fastest(group: Group, m: int, local_k: int, dtype: torch.dtype, scatters: bool, n: int) -> tuple[int, Tiling | None]:
    """Communicator blocks and tiling for a result of ``n`` columns; no tiling: what the model says."""
    k = group.world_size * local_k
    best, *others = gemm.rank_tilings(m, n, k, group.sm_count, tilings=gemm.tilings_for(group))
    options: list[tuple[int, Tiling | None]] = [(0, None), *((0, tiling) for tiling in others[:2])]
    options += [(blocks, best) for blocks in COMMUNICATOR_BLOCKS if not scatters]

    def make(option: tuple[int, Tiling | None]) -> AllGatherGemm:
        return AllGatherGemm(m, local_k, dtype, group, communicator_blocks=option[0], scatters=scatters, tiling=option[1])

    shapes = (m * (group.world_size if scatters else 1), local_k), (k, n)
    return gemm.tuned(group, "all_to_all_gemm" if scatters else "all_gather_gemm", shapes, dtype, options, make)
