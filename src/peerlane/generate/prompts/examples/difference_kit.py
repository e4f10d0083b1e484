"""Every rank returns its float32 tensor minus its left neighbour's: one kernel written with peerlane's device kit."""

import ctypes

import torch
import torch.distributed as dist

from peerlane.device import Arena, Kernel, compile_cubin

BLOCKS, THREADS = 64, 256  # all blocks must run at the same time, because they wait for other ranks
LINE = 128  # bytes of a flag

SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

// epochs, flags and data are offsets in the arena, the same on all ranks.
extern "C" __global__ void difference(
    const __grid_constant__ Arena arena, u64 epochs, u64 flags, u64 data, const char* x, char* out, u64 bytes) {
    const Block block;
    const Peers<WORLD_SIZE> peers(arena, flags);
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(epochs)));
    const int left = (arena.rank + WORLD_SIZE - 1) % WORLD_SIZE, right = (arena.rank + 1) % WORLD_SIZE;

    // Every block handles a part of its own, and talks to the blocks of the same number only.
    const Part vectors = part_of((bytes + 15) / 16, blockIdx.x, gridDim.x);
    const u64 end = vectors.end * 16 < bytes ? vectors.end * 16 : bytes, first = vectors.first * 16 < end ? vectors.first * 16 : end;

    copy_bytes(block, arena.peer(right, data + first), x + first, end - first);
    peers.signal(right, 2 * blockIdx.x, epoch);      // its data is there
    peers.wait(left, 2 * blockIdx.x, epoch);         // so is ours
    const float* theirs = reinterpret_cast<const float*>(arena.local(data));
    for (u64 i = first / 4 + threadIdx.x; i < end / 4; i += blockDim.x)
        reinterpret_cast<float*>(out)[i] = reinterpret_cast<const float*>(x)[i] - theirs[i];
    peers.acknowledge(left, 2 * blockIdx.x + 1, epoch);  // the left neighbour may write again
    peers.wait(right, 2 * blockIdx.x + 1, epoch);
}
"""

X, OUT = 4, 5  # places of the arguments that change from call to call

_state = {}  # number of bytes -> the launch, and the arena, which must stay alive


def state_of(nbytes):
    if nbytes not in _state:
        world_size = dist.get_world_size()
        sizes = (1024, 2 * BLOCKS * world_size * LINE, nbytes)
        arena = Arena(sum(sizes) + (1 << 16), timeout_s=10.0)  # collective: every rank comes here in its first call
        epochs, flags, data = (ctypes.c_uint64(arena.take(size)) for size in sizes)
        arena.seal()
        cubin = compile_cubin(SOURCE, defines={"WORLD_SIZE": world_size})  # NVRTC, cached by content
        kernel = Kernel(cubin, "difference", on_failure=arena.raise_fault)
        arguments = (arena.view, epochs, flags, data, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(nbytes))
        _state[nbytes] = kernel.bind(BLOCKS, THREADS, arguments), arena
    return _state[nbytes][0]


def solution(x):
    x = x.contiguous()
    result = torch.empty_like(x)
    if x.numel():
        launch = state_of(x.nbytes)
        launch.args[X].value, launch.args[OUT].value = x.data_ptr(), result.data_ptr()
        launch()
    return result
