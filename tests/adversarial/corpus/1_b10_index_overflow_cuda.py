"""B10: the place of a rank's terms in a signed 32-bit integer: rank 1 starts two gibibytes before its place, outside the arena."""

import ctypes

import torch
import torch.distributed as dist

from peerlane.device import Arena, Kernel, compile_cubin

SOURCE = r"""
#include <peerlane/arena.cuh>

using namespace peerlane;

__device__ u32* flag(const Arena& arena, int reader, u64 flags, u32 writer) {
    return reinterpret_cast<u32*>(arena.peer(reader, flags)) + blockIdx.x * max_ranks + writer;
}

// What this block did so far is done before any rank's same block is past its wait for the number.
__device__ void announce(const Arena& arena, u64 flags, u32 number) {
    __syncthreads();
    if (threadIdx.x < arena.world_size) {
        ptx::fence_system();
        ptx::store_relaxed_system(flag(arena, threadIdx.x, flags, arena.rank), number);
    }
}

__device__ void wait(const Arena& arena, u64 flags, u32 number) {
    if (threadIdx.x < arena.world_size) {
        const u32* place = flag(arena, arena.rank, flags, threadIdx.x);
        Deadline deadline;
        u32 seen;
        while (!reached(seen = ptx::load_relaxed_system(place), number)) {
            if (deadline.expired(arena)) fail(arena, {whole_block, threadIdx.x, 0, number}, seen);
        }
        ptx::fence_system();
    }
    __syncthreads();
}

extern "C" __global__ void all_reduce(
    const __grid_constant__ Arena arena, u64 flags, u64 epochs, u64 terms, const float* in, float* out, u64 count) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(epochs)));
    const u64 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    constexpr u32 stride = 1u << 31;
    float* mine = reinterpret_cast<float*>(arena.local(terms) + static_cast<int>(arena.rank * stride));
    for (u64 i = first; i < count; i += step) mine[i] = in[i];
    announce(arena, flags, 2 * epoch);
    wait(arena, flags, 2 * epoch);  // everybody's terms are there
    for (u64 i = first; i < count; i += step) {
        float total = 0.0f;
        for (u32 q = 0; q < arena.world_size; ++q) {
            total += reinterpret_cast<const float*>(arena.peer(q, terms) + static_cast<int>(q * stride))[i];
        }
        out[i] = total;
    }
    announce(arena, flags, 2 * epoch + 1);
    wait(arena, flags, 2 * epoch + 1);  // everybody has read them
}
"""
CUBIN = compile_cubin(SOURCE)
BLOCKS, THREADS = 64, 256
STRIDE_BYTES = 2 << 30  # between the ranks' places


class AllReduce:
    """The arena and the kernel, made by the first call and kept."""

    def __init__(self):
        self.arena = Arena(dist.get_world_size() * STRIDE_BYTES + (1 << 20), timeout_s=5.0)
        sizes = (4 * 8 * BLOCKS, 4 * 256, dist.get_world_size() * STRIDE_BYTES)  # flags, epochs, terms
        self.places = [ctypes.c_uint64(self.arena.take(size)) for size in sizes]
        self.arena.seal()
        self.kernel = Kernel(CUBIN, "all_reduce", on_failure=self.arena.raise_fault)

    def __call__(self, terms):
        out = torch.empty_like(terms)
        self.kernel.launch(BLOCKS, THREADS, [self.arena.view, *self.places, terms, out, ctypes.c_uint64(terms.numel())])
        return out


all_reduce = None


def solution(tensor):
    global all_reduce
    all_reduce = all_reduce or AllReduce()
    return all_reduce(tensor.float().contiguous()).to(tensor.dtype)
