"""A07: pushes its terms into the peers' memory, with two buffers in turn and no barrier at the end. Epochs are never reset (A06)."""

import ctypes

import torch

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

// Two buffers in turn and no barrier at the end: who has all terms of a launch knows that every rank is done with the launch before.
extern "C" __global__ void all_reduce(
    const __grid_constant__ Arena arena, u64 flags, u64 epochs, u64 terms, const float* in, float* out, u64 count) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(epochs)));
    const u64 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const u64 buffer = terms + epoch % 2 * (max_ranks * room * sizeof(float));
    for (u32 q = 0; q < arena.world_size; ++q) {
        float* theirs = reinterpret_cast<float*>(arena.peer(q, buffer)) + arena.rank * room;
        for (u64 i = first; i < count; i += step) theirs[i] = in[i];
    }
    announce(arena, flags, epoch);
    wait(arena, flags, epoch);
    const float* mine = reinterpret_cast<const float*>(arena.local(buffer));
    for (u64 i = first; i < count; i += step) {
        float total = 0.0f;
        for (u32 q = 0; q < arena.world_size; ++q) total += mine[q * room + i];
        out[i] = total;
    }
}
"""
BLOCKS, THREADS, ROOM = 64, 256, 1 << 20  # elements of the largest tensor
TERMS_BYTES = 2 * 8 * 4 * ROOM
CUBIN = compile_cubin(SOURCE, defines={"room": f"{ROOM}ull"})


class AllReduce:
    """The arena and the kernel, made by the first call and kept."""

    def __init__(self):
        self.arena = Arena(TERMS_BYTES + (1 << 20), timeout_s=5.0)
        sizes = (4 * 8 * BLOCKS, 4 * 256, TERMS_BYTES)  # flags, epochs, terms
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
