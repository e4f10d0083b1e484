// Values that all blocks of a rank, or of all ranks, make together inside one launch.
#pragma once

#include <peerlane/rows.cuh>

namespace peerlane {

// Values of all blocks of every rank, joined for each rank: `of_rank`, in shared memory, has the same bits everywhere. Each block gives one value
// of at most 12 bytes, that of its thread 0; all threads call. Values travel as packets, also between blocks of one rank, so there is no fence
// and no barrier over the grid, but all blocks must be resident. `space` has a packet for each block; all ranks launch one grid, and each
// launch calls this once for a space. The order of the terms follows from the grid alone, whatever the size of blocks.
template <int W, class T, class Join>
__device__ inline void grid_reduce(const Arena& arena, const PacketSpace& space, u32 epoch, const T& own, const T& zero, const Join& join, T (&of_rank)[W]) {
    using Exchange = SmallExchange<W, T>;
    const Exchange values(arena, space, epoch);
    u32 data[packet_words];
    if (threadIdx.x == 0) {
        Exchange::pack(own, data);
#pragma unroll
        for (int k = 0; k < W; ++k) push_packet(arena.peer(rank_after<W>(arena.rank, k), values.place(arena.rank, blockIdx.x)), data, epoch);
    }
    for (u32 q = threadIdx.x / warp_threads; q < W; q += blockDim.x / warp_threads) {
        T total = zero;
        for (u32 block = Warp{}.thread(); block < gridDim.x; block += warp_threads) {
            pull_packet(arena, q, arena.local(values.place(q, block)), block, epoch, data);
            total = join(total, Exchange::unpack(data));
        }
        total = warp_reduce(total, join);
        if (Warp{}.thread() == 0) of_rank[q] = total;
    }
    __syncthreads();
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
