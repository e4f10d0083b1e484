"""Reduce-scatter around a ring: in every step a rank adds its rows to the sum that came from the left, and stores it at the right."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cuda/atomic>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <pybind11/pybind11.h>
#include <stdexcept>
#include <vector>

using Flag = cuda::atomic_ref<unsigned, cuda::thread_scope_system>;

// own: a slot a step, where the left rank's sums arrive. arrived: the last step that is there.
// free_here, left_free: the last step whose slot has been read.
template <typename T>
__global__ void step(const T* rows, const float* own, float* right, T* out, int n, bool first, bool last, unsigned* arrived,
                     unsigned* right_arrived, unsigned* free_here, unsigned* left_free, unsigned number, unsigned slots) {
    if (threadIdx.x == 0) {
        if (!first) while (Flag(*arrived).load(cuda::memory_order_acquire) < number - 1) {}
        if (!last && number > slots) while (Flag(*free_here).load(cuda::memory_order_acquire) < number - slots) {}
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float sum = static_cast<float>(rows[i]) + (first ? 0.0f : own[i]);
        if (last) out[i] = static_cast<T>(sum);
        else right[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (!last) Flag(*right_arrived).store(number, cuda::memory_order_release);
        if (!first) Flag(*left_free).store(number - 1, cuda::memory_order_release);
    }
}

template <typename T>
void ring(const T* x, T* out, int n, const std::vector<uintptr_t>& memory, const std::vector<uintptr_t>& pads, int rank, unsigned call,
          cudaStream_t stream) {
    const int world = memory.size(), left = (rank + world - 1) % world, right = (rank + 1) % world;
    auto* own = reinterpret_cast<float*>(memory[rank]);
    auto* next = reinterpret_cast<float*>(memory[right]);
    auto flag = [&](int of, int which) { return reinterpret_cast<unsigned*>(pads[of]) + which; };
    for (int s = 0; s < world; ++s) {
        const int part = (rank + 2 * world - 1 - s) % world;  // it ends at its own rank
        const unsigned number = call * world + s + 1;
        step<T><<<1, 128, 0, stream>>>(x + size_t(part) * n, own + size_t((s + world - 1) % world) * n, next + size_t(s) * n, out, n,
                                       s == 0, s == world - 1, flag(rank, 0), flag(right, 0), flag(rank, 1), flag(left, 1), number, world);
    }
}

void reduce_scatter(uintptr_t x, uintptr_t out, int n, int kind, pybind11::list memory, pybind11::list pads, int rank, unsigned call,
                    uintptr_t stream) {
    std::vector<uintptr_t> all, flags;
    for (auto item : memory) all.push_back(item.cast<uintptr_t>());
    for (auto item : pads) flags.push_back(item.cast<uintptr_t>());
    auto on = reinterpret_cast<cudaStream_t>(stream);
    if (kind == 0) ring((const __nv_bfloat16*)x, (__nv_bfloat16*)out, n, all, flags, rank, call, on);
    else if (kind == 1) ring((const __half*)x, (__half*)out, n, all, flags, rank, call, on);
    else ring((const float*)x, (float*)out, n, all, flags, rank, call, on);
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("reduce_scatter", &reduce_scatter); }
"""

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
FLAGS = ["-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "-U__CUDA_NO_HALF_CONVERSIONS__"]
extension = load_inline("ring_reduce_scatter", [], [SOURCE], extra_cuda_cflags=FLAGS, no_implicit_headers=True, verbose=False)
state = {}


def solution(tensor):
    x = tensor.contiguous()
    if x.shape not in state:
        memory = symm_mem.empty(max(x.numel(), 1), dtype=torch.float32, device=x.device)
        state[x.shape] = [symm_mem.rendezvous(memory, dist.group.WORLD), 0]
    handle, calls = state[x.shape]
    state[x.shape][1] += 1
    out = torch.empty_like(x[: x.shape[0] // handle.world_size])
    stream = torch.cuda.current_stream().cuda_stream
    pointers = handle.buffer_ptrs, handle.signal_pad_ptrs
    extension.reduce_scatter(x.data_ptr(), out.data_ptr(), out.numel(), KINDS[x.dtype], *pointers, handle.rank, calls, stream)
    return out
