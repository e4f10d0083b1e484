"""All-reduce in one shot, as models write it: load_inline, symmetric memory, a barrier of ranks in the kernel.

Every rank copies its tensor to symmetric memory, waits for the others, and adds up what all ranks have there.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

// Blocks of one number wait for each other: thread r signals rank r by changing 0 to 1, and takes its signal by changing 1 to 0.
__device__ void meet(unsigned* const* pads, int rank, int world) {
    __syncthreads();
    if (threadIdx.x < world) {
        unsigned* theirs = pads[threadIdx.x] + blockIdx.x * world + rank;
        unsigned* own = pads[rank] + blockIdx.x * world + threadIdx.x;
        unsigned seen;
        do asm volatile("atom.release.sys.global.cas.b32 %0, [%1], 0, 1;" : "=r"(seen) : "l"(theirs) : "memory"); while (seen != 0);
        do asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], 1, 0;" : "=r"(seen) : "l"(own) : "memory"); while (seen != 1);
    }
    __syncthreads();
}

template <typename T>
__global__ void one_shot(T* const* buffers, unsigned* const* pads, const T* in, T* out, long n, int rank, int world) {
    const long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (long i = first; i < n; i += step) buffers[rank][i] = in[i];
    meet(pads, rank, world);
    for (long i = first; i < n; i += step) {
        float sum = 0;
        for (int r = 0; r < world; ++r) sum += static_cast<float>(buffers[r][i]);
        out[i] = static_cast<T>(sum);
    }
    meet(pads, rank, world);  // nobody writes the next tensor before all have read this one
}

torch::Tensor all_reduce(torch::Tensor x, int64_t buffers, int64_t pads, int64_t rank, int64_t world) {
    TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "expected a contiguous tensor on a GPU");
    auto out = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "all_reduce", [&] {
        one_shot<scalar_t><<<4, 128, 0, at::cuda::getCurrentCUDAStream()>>>(
            reinterpret_cast<scalar_t* const*>(buffers), reinterpret_cast<unsigned* const*>(pads),
            x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.numel(), rank, world);
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

DECLARED = "torch::Tensor all_reduce(torch::Tensor x, int64_t buffers, int64_t pads, int64_t rank, int64_t world);"
extension = load_inline("one_shot", cpp_sources=DECLARED, cuda_sources=SOURCE, functions=["all_reduce"])
state = {}


def solution(tensor: torch.Tensor) -> torch.Tensor:
    key = tensor.numel(), tensor.dtype
    if key not in state:
        buffer = symm_mem.empty(max(tensor.numel(), 1), dtype=tensor.dtype, device=tensor.device)
        state[key] = symm_mem.rendezvous(buffer, dist.group.WORLD)
    handle = state[key]
    return extension.all_reduce(
        tensor.contiguous(), handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, dist.get_rank(), dist.get_world_size()
    )
