"""B06: a barrier over a grid that is larger than what is resident at a time: the blocks that run wait for those that cannot."""

import ctypes

import torch
import torch.distributed as dist

from peerlane.device import Kernel, compile_cubin

SOURCE = r"""
#include <peerlane/ptx.cuh>

// Ends after a minute, so that no GPU is lost should the kernel outlive its process.
extern "C" __global__ void copy_behind_a_grid_barrier(const float* in, float* out, unsigned long long count, unsigned* arrived) {
    const unsigned long long end = peerlane::ptx::globaltimer() + 60ull * 1000 * 1000 * 1000;
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        while (*reinterpret_cast<volatile unsigned*>(arrived) < gridDim.x && peerlane::ptx::globaltimer() < end) {}
    }
    __syncthreads();
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) out[i] = in[i];
}
"""
CUBIN = compile_cubin(SOURCE)
BLOCKS, THREADS = 4096, 1024


def solution(tensor):
    total = tensor.to(torch.float32, copy=True)
    dist.all_reduce(total)
    out, arrived = torch.empty_like(total), torch.zeros(1, dtype=torch.int32, device=total.device)
    args = [total, out, ctypes.c_uint64(total.numel()), arrived]
    Kernel(CUBIN, "copy_behind_a_grid_barrier").launch(BLOCKS, THREADS, args)
    return out.to(tensor.dtype)
