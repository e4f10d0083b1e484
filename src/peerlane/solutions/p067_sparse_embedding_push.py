"""Problem 67, pairs of ids and rows pushed to their owners: one kernel counts, tells the host the result's size, and stores pairs in place.

Blocks take stretches of pairs, and count how many are for which owner. From the counts of lower blocks and ranks they know the place of
every pair in its owner's result, without a sort: a stretch is read in order, and its pairs of one owner lie together there. Bound by the
links, which carry each pair once. If pairs do not fit, all ranks see so, make room and launch again.

The next call overwrites the results, which lie in the arena."""

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, group_of, per_group
from peerlane.device.collectives.counts import HostWords

SOURCE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(THREADS)
    push_pairs(const __grid_constant__ Arena arena, const __grid_constant__ PushPairs args) {
    __shared__ u32 next[WORLD_SIZE], total[WORLD_SIZE], owners[THREADS], places[THREADS];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const Part part = part_of(args.count, blockIdx.x, gridDim.x);
    const ID_TYPE* ids = reinterpret_cast<const ID_TYPE*>(args.ids);
    const auto owner_of = [&](u64 i) { return static_cast<u32>(static_cast<u64>(ids[i]) % WORLD_SIZE); };

    u32* counts = reinterpret_cast<u32*>(arena.local(args.counts));  // [block][owner]
    count_owners<WORLD_SIZE>(counts, part, owner_of);
    meet_blocks(peers, arena, 0, epoch);
    each_owner<WORLD_SIZE>(counts, [&](u32 q, u32 before, u32 all) { next[q] = before, total[q] = all; });
    __syncthreads();

    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < WORLD_SIZE * WORLD_SIZE; i += blockDim.x) {
            const u32 target = i / WORLD_SIZE, q = i % WORLD_SIZE;
            reinterpret_cast<u32*>(arena.peer(target, args.table))[arena.rank * WORLD_SIZE + q] = total[q];
        }
        peers.signal_all(2 * gridDim.x, epoch);
    }
    peers.wait_all(2 * gridDim.x, epoch);  // all ranks' callers have read the results of the launch before
    const bool arrived = block_arrived(arena);
    const u32* table = reinterpret_cast<const u32*>(arena.local(args.table));
    const auto pairs_before = [&](u32 source, u32 q) {
        u32 sum = 0;
        for (u32 r = 0; r < source; ++r) sum += r == arena.rank ? total[q] : table[r * WORLD_SIZE + q];
        return sum;
    };
    u32 most = 0;
    for (u32 q = 0; q < WORLD_SIZE; ++q) most = max(most, pairs_before(WORLD_SIZE, q));
    if (arrived && blockIdx.x == 0 && threadIdx.x == 0) {
        args.host[1] = pairs_before(WORLD_SIZE, arena.rank), args.host[2] = most;
        tell_host(args.host, args.stamp);
    }
    if (threadIdx.x < WORLD_SIZE) next[threadIdx.x] += pairs_before(arena.rank, threadIdx.x);
    __syncthreads();

    const bool vectors = (reinterpret_cast<u64>(args.rows) | args.row_bytes) % sizeof(Vec16) == 0;
    for (u64 begin = arrived && most <= args.capacity ? part.first : part.end; begin < part.end; begin += blockDim.x) {
        const u64 i = begin + threadIdx.x;
        const u32 owner = i < part.end ? owner_of(i) : WORLD_SIZE;
        const u32 place = take_place(owner, next);
        if (owner < WORLD_SIZE) {
            owners[threadIdx.x] = owner, places[threadIdx.x] = place;
            reinterpret_cast<ID_TYPE*>(arena.peer(owner, args.out_ids))[place] = ids[i];
        }
        __syncthreads();
        const auto from = [&](u32 r) { return args.rows + (begin + r) * args.row_bytes; };
        const auto to = [&](u32 r) { return arena.peer(owners[r], args.out) + u64(places[r]) * args.row_bytes; };
        const u32 count = static_cast<u32>(min(u64(blockDim.x), part.end - begin));
        copy_rows(Share{threadIdx.x, blockDim.x}, count, args.row_bytes, vectors, from, to);
        __syncthreads();
    }
    peers.barrier(gridDim.x + blockIdx.x, epoch);
}
"""
THREADS = 512
PUSH_PAIRS = DeclaredKernel(
    "push_pairs", SOURCE, epochs=Epochs(), flags=Flags(), counts=Buffer(), table=Buffer(), out_ids=Buffer(), out=Buffer(), ids=Pointer(),
    rows=Pointer("const char*"), host=Pointer("u64*"), stamp=U32, count=U32, capacity=U32, row_bytes=U32,
)  # fmt: skip
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}


@per_group
def room(group: Group) -> list[int]:
    """Returns the pairs of a rank that memory is made for, in a list: what all ranks have seen of the calls before."""
    return [1024]


@per_group
def push_pairs(group: Group, dtype: torch.dtype, row_bytes: int, capacity: int) -> tuple[BoundKernel, HostWords]:
    """Makes the launch of a group. ``capacity``: of pairs at a rank. The host gets how many come, and the most that come anywhere."""
    told, grid, world = HostWords(group, 2), group.sm_count, group.world_size
    sizes = {
        "flags": 2 * grid + 1, "counts": 4 * grid * world, "table": 4 * world * world, "out_ids": dtype.itemsize * capacity,
        "out": row_bytes * capacity,
    }  # fmt: skip
    launch = PUSH_PAIRS.bind(
        group, grid=grid, block=min(THREADS, group.max_threads), defines={"ID_TYPE": ID_TYPES[dtype], "THREADS": THREADS}, sizes=sizes,
        resident=True, host=told.words, capacity=capacity, row_bytes=row_bytes,
    )  # fmt: skip
    return launch, told


def solution(
    idx: torch.Tensor, value: torch.Tensor, num_nodes: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, row = group_of(group), value.shape[1:]
    if ranks.world_size == 1:
        return idx, value
    ids, rows, fits = idx.contiguous(), value.contiguous(), room(ranks)
    while True:
        launch, told = push_pairs(ranks, idx.dtype, row.numel() * value.itemsize, fits[0])
        launch(ids=ids, rows=rows, count=len(ids), stamp=told.stamp())
        received, most = told.read()
        if most <= fits[0]:
            return launch.tensor("out_ids", (received,), idx.dtype), launch.tensor("out", (received, *row), value.dtype)
        fits[0] = 1 << most.bit_length()
