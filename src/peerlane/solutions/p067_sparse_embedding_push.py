"""Problem 67, pairs of ids and rows pushed to their owners: one question to the device for all sizes, and one kernel that moves all pairs.

Owners are sorted, a byte each. The kernel takes pairs in that order from both ends, so that links and memory work together, and stores each
at its place: in the owner's arena, or in the result where the owner is the rank itself. Bound by the question, since the results' shapes
follow from all ranks' ids, and at large sizes by the links. ``device/collectives/counts.py`` and ``device/include/peerlane/moe.cuh``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, array, group_of, per_group
from peerlane.device.collectives.counts import share_counts
from peerlane.device.host.group import MAX_RANKS
from peerlane.device.moe.exchange import starts

SOURCE = r"""
#include <peerlane/moe.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    sparse_push(const __grid_constant__ Arena arena, const __grid_constant__ SparsePush args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), count = args.start[WORLD_SIZE];
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const bool vectors = (reinterpret_cast<u64>(args.rows) | reinterpret_cast<u64>(args.rows_out) | args.row_bytes) % sizeof(Vec16) == 0;

    // Sizes have been shared since the launch before was done on all ranks: what it left in the arena has been taken.
    const auto pair_of = [&](u32 n) { return n % 2 ? count - 1 - n / 2 : n / 2; };
    const auto place = [&](u32 pair, char* here, u64 there, u32 bytes) {
        const int q = part_with<WORLD_SIZE>(args.start, pair);
        return (q == arena.rank ? here : arena.peer(q, there)) + u64(args.at[q] + pair - args.start[q]) * bytes;
    };
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (u32 pair = thread; pair < count; pair += threads) {
        *reinterpret_cast<ID*>(place(pair, args.ids_out, args.ids_came, sizeof(ID))) = args.ids[args.order[pair]];
    }
    copy_rows(count, args.row_bytes, vectors, [&](u32 n) { return args.rows + u64(args.order[pair_of(n)]) * args.row_bytes; },
              [&](u32 n) { return place(pair_of(n), args.rows_out, args.rows_came, args.row_bytes); });
    meet_ranks(peers, arena, 0, epoch);

    const u32 first = args.at[arena.rank], own = args.start[arena.rank + 1] - args.start[arena.rank];
    const u32 others = block_arrived(arena) ? args.received - own : 0;
    const auto other = [&](u32 i) { return i < first ? i : i + own; };
    for (u32 i = thread; i < others; i += threads) {
        reinterpret_cast<ID*>(args.ids_out)[other(i)] = reinterpret_cast<const ID*>(arena.local(args.ids_came))[other(i)];
    }
    copy_rows(others, args.row_bytes, vectors, [&](u32 i) { return arena.local(args.rows_came) + u64(other(i)) * args.row_bytes; },
              [&](u32 i) { return args.rows_out + u64(other(i)) * args.row_bytes; });
}
"""
SPARSE_PUSH = DeclaredKernel(
    "sparse_push", SOURCE, epochs=Epochs(), flags=Flags(), ids_came=Buffer(), rows_came=Buffer(), ids=Pointer("const ID*"),
    order=Pointer("const long long*"), rows=Pointer("const char*"), ids_out=Pointer(), rows_out=Pointer(),
    start=array(U32, MAX_RANKS + 1), at=array(U32, MAX_RANKS), received=U32, row_bytes=U32,
)  # fmt: skip
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}


@per_group
def sparse_push(group: Group, room: int, row_bytes: int, ids: torch.dtype) -> BoundKernel:
    """Collective: returns the launch for up to ``room`` pairs that a rank receives."""
    sizes = {"flags": group.sm_count, "ids_came": room * ids.itemsize, "rows_came": room * row_bytes}
    return SPARSE_PUSH.bind(
        group, grid=group.sm_count, block=min(512, group.max_threads), defines={"ID": ID_TYPES[ids]}, sizes=sizes, resident=True,
        row_bytes=row_bytes,
    )  # fmt: skip


def solution(
    idx: torch.Tensor, value: torch.Tensor, num_nodes: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = group_of(group)
    world, rank = ranks.world_size, ranks.rank
    if world == 1:
        return idx, value
    owner, order = torch.sort((idx % world).to(torch.uint8), stable=True)
    places = torch.arange(world + 1, device=idx.device, dtype=torch.uint8)
    table = share_counts(ranks, torch.searchsorted(owner, places).diff())
    received = [sum(of_rank[q] for of_rank in table) for q in range(world)]
    row_bytes = value.shape[1:].numel() * value.itemsize
    launch = sparse_push(ranks, 1 << max(received).bit_length(), row_bytes, idx.dtype)
    ids_out, rows_out = idx.new_empty(received[rank]), value.new_empty((received[rank], *value.shape[1:]))
    launch(
        ids=idx.contiguous(), order=order, rows=value.contiguous(), ids_out=ids_out, rows_out=rows_out, start=starts(table[rank]),
        at=[sum(of_rank[q] for of_rank in table[:rank]) for q in range(world)] + [0] * (MAX_RANKS - world), received=received[rank],
    )  # fmt: skip
    return ids_out, rows_out
