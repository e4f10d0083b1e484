"""A kernel of the device kit with one line removed: its flag can overtake the words that it announces."""

import ctypes

import torch

from peerlane.emulator import Scenario

SOURCE = """
#include <peerlane/comm.cuh>
using namespace peerlane;

extern "C" __global__ void exchange(const __grid_constant__ Arena arena, u64 words, u64 flag, u32* out) {
    const u32 peer = arena.rank ^ 1;
    reinterpret_cast<u32*>(arena.peer(peer, words))[threadIdx.x] = 100 * arena.rank + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        // removed: ptx::fence_system();  // release
        ptx::store_relaxed_system(reinterpret_cast<u32*>(arena.peer(peer, flag)), 1);
        while (ptx::load_relaxed_system(reinterpret_cast<u32*>(arena.local(flag))) < 1) {}
        ptx::fence_system();  // acquire
    }
    __syncthreads();
    out[threadIdx.x] = reinterpret_cast<u32*>(arena.local(words))[threadIdx.x];
}
"""


def race(world_size):
    scenario = Scenario("missing_release", SOURCE, world_size)
    arena = scenario.arena(4096)
    words, flag = arena.take(128), arena.take(128)
    expected = [(100 * (rank ^ 1) + torch.arange(32)).int() for rank in range(world_size)]
    out = scenario.buffer("out", [torch.zeros(32, dtype=torch.int32)] * world_size, expected=expected)
    scenario.launch("exchange", grid=1, block=32, args=[arena, ctypes.c_uint64(words), ctypes.c_uint64(flag), out])
    yield scenario
