// Who calls a primitive: the threads of a team, all of them, together. Blocks are one-dimensional.
//
// A team has `thread()` (the caller's number in it), `size()` and `sync()`, behind which every thread sees what each did before.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {

constexpr u32 warp_threads = 32;

struct Block {
    __device__ u32 thread() const { return threadIdx.x; }
    __device__ u32 size() const { return blockDim.x; }
    __device__ void sync() const { __syncthreads(); }
};

// `count` warps from warp `first` on, which meet at the named barrier `barrier` (1 to 15, not shared with another team at work).
struct Warps {
    u32 first, count, barrier;

    __device__ u32 thread() const { return threadIdx.x - first * warp_threads; }
    __device__ u32 size() const { return count * warp_threads; }
    __device__ void sync() const { ptx::barrier_sync(barrier, size()); }
};

constexpr u32 full_warp = 0xffffffffu;  // of votes

// The caller's warp, all 32 lanes.
struct Warp {
    __device__ u32 thread() const { return threadIdx.x % warp_threads; }
    __device__ u32 size() const { return warp_threads; }
    __device__ void sync() const { __syncwarp(); }
};

// The caller alone.
struct Thread {
    __device__ u32 thread() const { return 0; }
    __device__ u32 size() const { return 1; }
    __device__ void sync() const {}
};

}  // namespace peerlane
