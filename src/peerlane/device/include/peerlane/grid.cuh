// Values that all blocks of a rank, or of all ranks, make together inside one launch.
#pragma once

#include <peerlane/rows.cuh>

namespace peerlane {

// Values of all blocks of every rank, joined for each rank: `of_rank`, in shared memory, has the same bits everywhere. Each block gives one value
// of at most 12 bytes, that of its thread 0; all threads call. Values travel as packets, also between blocks of one rank, so there is no fence
// and no barrier over the grid, but all blocks must be resident. `space` has a packet for each block; all ranks launch one grid, and each
// launch sends once to a space and receives from every rank. The order of the terms follows from the grid alone, whatever the size of blocks.
template <int W, class T>
__device__ inline void grid_send(const Arena& arena, const PacketSpace& space, u32 epoch, const T& own) {
    if (threadIdx.x == 0) SmallExchange<W, T>(arena, space, epoch).send_everywhere(blockIdx.x, own);
}

// Of the ranks from the first-th to the one before the end-th after the own one. A warp has one packet a lane, for all are a trip to L2 away.
template <int W, class T, class Join>
__device__ inline void grid_receive(const Arena& arena, const PacketSpace& space, u32 epoch, u32 first, u32 end, const T& zero, const Join& join,
                                    T (&of_rank)[W]) {
    constexpr u32 most = 32;  // warps of blocks: no grid with an epoch for each block has more
    __shared__ T of_warp[W][most];
    const SmallExchange<W, T> values(arena, space, epoch);
    const u32 each = (gridDim.x + warp_threads - 1) / warp_threads;
    for (u32 i = threadIdx.x / warp_threads; i < (end - first) * each; i += blockDim.x / warp_threads) {
        const u32 q = rank_after<W>(arena.rank, first + i / each), block = i % each * warp_threads + Warp{}.thread();
        const T total = warp_reduce(block < gridDim.x ? values.receive_from(q, block) : zero, join);
        if (Warp{}.thread() == 0) of_warp[q][i % each] = total;
    }
    __syncthreads();
    if (threadIdx.x < end - first) {
        const u32 q = rank_after<W>(arena.rank, first + threadIdx.x);
        T total = of_warp[q][0];
        for (u32 warp = 1; warp < each; ++warp) total = join(total, of_warp[q][warp]);
        of_rank[q] = total;
    }
    __syncthreads();
}
template <int W, class T, class Join>
__device__ inline void grid_reduce(const Arena& arena, const PacketSpace& space, u32 epoch, const T& own, const T& zero, const Join& join, T (&of_rank)[W]) {
    grid_send<W>(arena, space, epoch, own);
    grid_receive(arena, space, epoch, 0, W, zero, join, of_rank);
}

// Whether the caller's block is the last one of `blocks` to come here; it then sees what the others have written. `counter` is zero at first
// and again afterwards; all threads call.
__device__ inline bool last_block(u32* counter, u32 blocks) {
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::fence_gpu();
        before = ptx::add_relaxed_gpu(counter, 1);
        ptx::fence_gpu();
        if (before + 1 == blocks) ptx::add_relaxed_gpu(counter, 0u - blocks);
    }
    __syncthreads();
    return before + 1 == blocks;
}

}  // namespace peerlane
