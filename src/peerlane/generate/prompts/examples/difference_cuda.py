"""Every rank returns its float32 tensor minus its left neighbour's: one CUDA kernel that writes to the right and waits for the left."""

import os

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

BLOCKS, THREADS = 64, 256  # all blocks must run at the same time, because they wait for other ranks

KERNEL = r"""
__device__ void raise_flag(unsigned* flag, unsigned number) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}

// Ten seconds at most: a lost signal ends the kernel instead of hanging the node.
__device__ void wait_for(const unsigned* flag, unsigned number) {
    unsigned seen;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - start > 10000000000ull) __trap();
    } while (static_cast<int>(seen - number) < 0);
}

// Flag b of a pad: block b's data has come from the left. Flag gridDim.x + b: the right neighbour has read it.
extern "C" __global__ void difference(const float* x, float* out, long long count, float* own_data, float* right_data, unsigned* own_pad,
                                      unsigned* left_pad, unsigned* right_pad, unsigned* epochs) {
    const unsigned epoch = epochs[blockIdx.x] + 1;  // lives on the device, so a captured graph can be replayed
    if (threadIdx.x == 0) wait_for(own_pad + gridDim.x + blockIdx.x, epoch - 1);  // the right neighbour has read what was sent before
    __syncthreads();
    const long long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (long long i = first; i < count; i += step) right_data[i] = x[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        raise_flag(right_pad + blockIdx.x, epoch);
        wait_for(own_pad + blockIdx.x, epoch);
    }
    __syncthreads();
    for (long long i = first; i < count; i += step) out[i] = x[i] - __ldcv(own_data + i);
    __syncthreads();
    if (threadIdx.x == 0) {
        raise_flag(left_pad + gridDim.x + blockIdx.x, epoch);
        epochs[blockIdx.x] = epoch;
    }
}
"""

BINDING = r"""
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

void launch(torch::Tensor x, torch::Tensor out, int64_t own_data, int64_t right_data, int64_t own_pad, int64_t left_pad, int64_t right_pad,
            torch::Tensor epochs, int64_t blocks, int64_t threads) {
    difference<<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), out.data_ptr<float>(), x.numel(), reinterpret_cast<float*>(own_data), reinterpret_cast<float*>(right_data),
        reinterpret_cast<unsigned*>(own_pad), reinterpret_cast<unsigned*>(left_pad), reinterpret_cast<unsigned*>(right_pad),
        reinterpret_cast<unsigned*>(epochs.data_ptr<int>()));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""

SIGNATURE = (
    "void launch(torch::Tensor x, torch::Tensor out, int64_t own_data, int64_t right_data, int64_t own_pad, int64_t left_pad, "
    "int64_t right_pad, torch::Tensor epochs, int64_t blocks, int64_t threads);"
)

# Compiled when the file is imported: one process of the node builds, before any GPU is used, and the ranks load the result.
extension = load_inline("neighbour_difference", cpp_sources=SIGNATURE, cuda_sources=KERNEL + BINDING, functions=["launch"])

_state = {}  # number of elements -> symmetric memory, its addresses by rank, epochs


def state_of(count, device):
    if count not in _state:
        data = symm_mem.empty(max(count, 1), dtype=torch.float32, device=device)
        flags = symm_mem.empty(2 * BLOCKS, dtype=torch.int32, device=device).zero_()
        handles = [symm_mem.rendezvous(memory, dist.group.WORLD) for memory in (data, flags)]
        handles[1].barrier(channel=0)  # nobody signals before all flags are zero
        epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
        _state[count] = (data, flags, handles), [list(handle.buffer_ptrs) for handle in handles], epochs
    return _state[count]


def solution(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = x.contiguous()
    out = torch.empty_like(x)
    _, (data, pads), epochs = state_of(x.numel(), x.device)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    extension.launch(x, out, data[rank], data[right], pads[rank], pads[left], pads[right], epochs, BLOCKS, THREADS)
    return out
