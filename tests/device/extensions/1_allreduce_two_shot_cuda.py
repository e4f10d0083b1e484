"""All-reduce in two shots: every rank adds up its share of all ranks' tensors, and stores it into every rank's symmetric memory."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

struct Peers {
    char* buffer[8];
    unsigned* pad[8];
    int rank, world;
};

__device__ __forceinline__ void meet(const Peers& peers, int slot) {
    __syncthreads();
    const int other = threadIdx.x, first = (slot * gridDim.x + blockIdx.x) * peers.world;
    if (other < peers.world) {
        unsigned *theirs = peers.pad[other] + first + peers.rank, *own = peers.pad[peers.rank] + first + other, seen;
        do {
            asm volatile("atom.global.release.sys.cas.b32 %0, [%1], 0, 1;" : "=r"(seen) : "l"(theirs) : "memory");
        } while (seen != 0);
        do {
            asm volatile("atom.global.acquire.sys.cas.b32 %0, [%1], 1, 0;" : "=r"(seen) : "l"(own) : "memory");
        } while (seen != 1);
    }
    __syncthreads();
}

template <typename T>
__global__ void two_shot(Peers peers, const T* in, T* out, int64_t n) {
    const int64_t share = (n + peers.world - 1) / peers.world, begin = share * peers.rank, end = min(n, begin + share);
    const int64_t thread = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, threads = int64_t(gridDim.x) * blockDim.x;
    T* own = reinterpret_cast<T*>(peers.buffer[peers.rank]);
    // Block b reads of each share what block b of the other rank has written there.
    for (int r = 0; r < peers.world; ++r)
        for (int64_t i = thread; i < share && share * r + i < n; i += threads) own[share * r + i] = in[share * r + i];
    meet(peers, 0);
    for (int64_t i = begin + thread; i < end; i += threads) {
        float sum = 0.0f;
        for (int r = 0; r < peers.world; ++r) sum += static_cast<float>(reinterpret_cast<const T*>(peers.buffer[r])[i]);
        for (int r = 0; r < peers.world; ++r) reinterpret_cast<T*>(peers.buffer[r])[n + i] = static_cast<T>(sum);
    }
    meet(peers, 1);
    for (int r = 0; r < peers.world; ++r)
        for (int64_t i = thread; i < share && share * r + i < n; i += threads) out[share * r + i] = own[n + share * r + i];
    meet(peers, 0);
}

torch::Tensor all_reduce(const torch::Tensor& x, const std::vector<int64_t>& buffers, const std::vector<int64_t>& pads, int64_t rank) {
    const at::cuda::OptionalCUDAGuard guard(at::device_of(x));
    Peers peers{};
    peers.rank = rank, peers.world = buffers.size();
    for (size_t r = 0; r < buffers.size(); ++r) {
        peers.buffer[r] = reinterpret_cast<char*>(buffers[r]);
        peers.pad[r] = reinterpret_cast<unsigned*>(pads[r]);
    }
    torch::Tensor out = torch::empty(x.sizes(), x.options());
    if (x.numel() == 0) return out;
    cudaStream_t stream = at::cuda::getCurrentCUDAStream().stream();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, x.scalar_type(), "all_reduce", [&] {
        two_shot<scalar_t><<<2, 64, 0, stream>>>(peers, x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.numel());
    });
    cudaError_t error = cudaGetLastError();
    TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
    return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("all_reduce", &all_reduce); }
"""

_extension = None
_handles = {}


def _compiled():
    global _extension
    if _extension is None:
        _extension = load_inline(name="two_shot", cpp_sources="", cuda_sources=SOURCE, extra_cuda_cflags=["-O3"], verbose=False)
    return _extension


def solution(tensor):
    key = (tensor.numel(), tensor.dtype)
    if key not in _handles:
        memory = symm_mem.empty(2 * tensor.numel() + 1, dtype=tensor.dtype, device=f"cuda:{torch.cuda.current_device()}")
        _handles[key] = symm_mem.rendezvous(memory, group=dist.group.WORLD.group_name)
    handle = _handles[key]
    return _compiled().all_reduce(tensor.contiguous(), list(handle.buffer_ptrs), list(handle.signal_pad_ptrs), handle.rank)
