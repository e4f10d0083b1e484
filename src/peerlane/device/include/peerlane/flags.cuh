// Many small flags with one writer each: what a role gives and waits for while the rest of its block is at other work.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/ptx_async.cuh>

namespace peerlane {

template <int W>
__device__ inline int rank_after(u32 rank, int k) {
    const int q = static_cast<int>(rank) + k;
    return q < W ? q : q - W;
}

// Consecutive flags in the arena, at `offset`. A flag holds an epoch, which only grows.
struct FlagRow {
    u64 offset;

    // By a warp: the copies to peers that its elected thread has started are complete, and seen, with all that the warp did before, by
    // whoever waits for this flag on `peer`.
    __device__ void signal(const Arena& arena, int peer, u32 index, u32 epoch) const {
        __syncwarp();
        if (ptx::elect_one()) {
            ptx::bulk_wait<0>();
            ptx::fence_proxy_async();
            ptx::fence_system();
            ptx::store_relaxed_system(reinterpret_cast<u32*>(arena.peer(peer, offset)) + index, epoch);
        }
    }

    // By a warp: until `source` has given flags 0 to count - 1 (at most 32) for this epoch. What it wrote before may then be read, by copies too.
    __device__ void wait(const Arena& arena, u32 count, u32 source, u32 epoch) const {
        const u32 lane = threadIdx.x % 32;
        if (lane < count) {
            const u32* flag = reinterpret_cast<const u32*>(arena.local(offset)) + lane;
            Deadline deadline;
            u32 seen;
            while (static_cast<int>((seen = ptx::load_relaxed_system(flag)) - epoch) < 0) {
                if (deadline.expired(arena)) fail(arena, source, lane, epoch, seen);
            }
            ptx::fence_system();
        }
        __syncwarp();
        ptx::fence_proxy_async();
    }
};

}  // namespace peerlane
