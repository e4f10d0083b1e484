"""Problem 10, lookup in a sharded table: one kernel sorts ids by owner, asks the owners, and takes their rows, in the problem's order.

Blocks take stretches of ids. They count how many are for which owner, then know the place of each id among its owner's, and send the owner
the number of the row and its place in the result, eight bytes. The owner's block of the same number stores the rows: in the asker's arena,
or in the result itself where the asker is the owner. So one meeting of a rank's blocks is enough, and ranks wait for each other block by
block. Bound by the links, which carry the rows. The result's size is known, so the host waits for nothing, and the call can be captured.
Meetings are in ``peerlane/moe/moe.cuh``."""

import torch

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, group_of, per_group
from peerlane.device.moe.exchange import room_for

SOURCE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

struct Wanted { u32 row, place; };  // the place in the asker's result

extern "C" __global__ void __launch_bounds__(512)
    embedding_lookup(const __grid_constant__ Arena arena, const __grid_constant__ EmbeddingLookup args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const Part part = part_of(args.count, blockIdx.x, gridDim.x);
    const auto owner_of = [&](u64 i) { return static_cast<u32>(args.ids[i] / args.rows); };
    __shared__ u32 next[WORLD_SIZE], total[WORLD_SIZE], before_own[WORLD_SIZE], asked[WORLD_SIZE];

    u32* counts = reinterpret_cast<u32*>(arena.local(args.counts));  // [block][owner]
    count_owners<WORLD_SIZE>(counts, part, owner_of);
    meet_blocks(peers, arena, 0, epoch);

    each_owner<WORLD_SIZE>(counts, [&](u32 q, u32 before, u32 all) {
        before_own[q] = before, total[q] = all, asked[q] = counts[blockIdx.x * WORLD_SIZE + q], next[q] = 0;
    });
    if (!block_arrived(arena)) return;
    const auto begin_of = [&](u32 q) {  // of this block's rows of an owner, in the result
        u32 begin = before_own[q];
        for (u32 p = 0; p < q; ++p) begin += total[p];
        return begin;
    };
    const auto area_of = [&](u32 source) { return args.inbox + (u64(source) * gridDim.x + blockIdx.x) * args.room * sizeof(Wanted); };
    for (u64 begin = part.first; begin < part.end; begin += blockDim.x) {
        const u64 i = begin + threadIdx.x;
        const u32 owner = i < part.end ? owner_of(i) : WORLD_SIZE;
        const u32 slot = take_place(owner, next);
        if (owner >= WORLD_SIZE) continue;
        const Wanted wanted{static_cast<u32>(args.ids[i] - owner * args.rows), begin_of(owner) + slot};
        reinterpret_cast<Wanted*>(arena.peer(owner, area_of(arena.rank)))[slot] = wanted;
    }
    if (threadIdx.x < WORLD_SIZE) {
        reinterpret_cast<u32*>(arena.peer(threadIdx.x, args.asked))[arena.rank * gridDim.x + blockIdx.x] = asked[threadIdx.x];
    }
    peers.barrier(gridDim.x + blockIdx.x, epoch);
    if (!block_arrived(arena)) return;

    const u64 bases = reinterpret_cast<u64>(args.shard) | reinterpret_cast<u64>(args.out);
    const bool vectors = (bases | args.row_bytes) % sizeof(Vec16) == 0;
    const auto row_at = [&](char* base, u32 row) { return base + u64(row) * args.row_bytes; };
    for (int k = 1; k <= WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k % WORLD_SIZE);
        const u32 count = reinterpret_cast<const u32*>(arena.local(args.asked))[q * gridDim.x + blockIdx.x];
        const Wanted* wanted = reinterpret_cast<const Wanted*>(arena.local(area_of(q)));
        char* to = q == arena.rank ? args.out : arena.peer(q, args.came);
        const auto row_of = [&](u32 i) { return args.shard + u64(wanted[i].row) * args.row_bytes; };
        const auto place_of = [&](u32 i) { return row_at(to, wanted[i].place); };
        copy_rows(Share{threadIdx.x, blockDim.x}, count, args.row_bytes, vectors, row_of, place_of);
    }
    peers.barrier(2 * gridDim.x + blockIdx.x, epoch);
    for (u32 q = 0; q < WORLD_SIZE; ++q) {
        if (q == arena.rank) continue;
        const u32 begin = begin_of(q);
        copy_bytes(Block{}, row_at(args.out, begin), row_at(arena.local(args.came), begin), u64(asked[q]) * args.row_bytes);
    }
}
"""
EMBEDDING_LOOKUP = DeclaredKernel(
    "embedding_lookup", SOURCE, ids=Pointer("const long long*"), shard=Pointer("const char*"), out=Pointer(), inbox=Buffer(),
    asked=Buffer(), came=Buffer(), counts=Buffer(), flags=Flags(), epochs=Epochs(), rows=U64, count=U32, room=U32, row_bytes=U32,
)  # fmt: skip


@per_group
def embedding_lookup(group: Group, room: int, row_bytes: int) -> BoundKernel:
    """Collective: returns the launch for up to ``room`` ids a rank."""
    world, grid, came = group.world_size, group.sm_count, room * row_bytes
    room = -(-room // grid)  # of a block
    sizes = {"inbox": 8 * world * grid * room, "asked": 4 * world * grid, "came": came, "counts": 4 * grid * world, "flags": 3 * grid}
    return EMBEDDING_LOOKUP.bind(
        group, grid=grid, block=min(512, group.max_threads), sizes=sizes, resident=True, room=room, row_bytes=row_bytes
    )


def solution(indices: torch.Tensor, local_shard: torch.Tensor) -> torch.Tensor:
    ranks, (rows, width) = group_of(), local_shard.shape
    if ranks.world_size == 1:
        return local_shard[indices]
    out = local_shard.new_empty((indices.shape[0], width))
    look_up = embedding_lookup(ranks, room_for(ranks, indices.shape[0]), width * local_shard.itemsize)
    look_up(ids=indices.contiguous(), shard=local_shard.contiguous(), out=out, rows=rows, count=indices.shape[0])
    return out
