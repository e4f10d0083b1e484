"""Reduce-scatter and RMSNorm in one kernel, a block a row: rows of all ranks are read from symmetric memory, which a copy has filled."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

// All blocks of all ranks: those of a rank count up behind its pad, then block 0 signals all ranks that its rank is here.
__device__ void grid_meet(const uint64_t* pads, int rank, int world, unsigned call) {
    unsigned* arrived = reinterpret_cast<unsigned*>(pads[rank]) + 64;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        atomicAdd(arrived, 1u);
        if (blockIdx.x == 0) {
            while (atomicAdd(arrived, 0u) < gridDim.x * call) {}
            __threadfence_system();
            for (int r = 0; r < world; ++r) atomicExch_system(reinterpret_cast<unsigned*>(pads[r]) + rank, call);
        }
        for (int r = 0; r < world; ++r)
            while (atomicAdd_system(reinterpret_cast<unsigned*>(pads[rank]) + r, 0u) < call) {}
        __threadfence_system();
    }
    __syncthreads();
}

template <typename T>
__global__ void rms_norm_rows(const uint64_t* buffers, const uint64_t* pads, const float* gamma, T* out, int rows, int hidden, float eps,
                              int rank, int world, unsigned call) {
    extern __shared__ float row[];
    __shared__ float partial[32];
    grid_meet(pads, rank, world, 2 * call - 1);
    for (int r = blockIdx.x; r < rows; r += gridDim.x) {
        float squares = 0.0f;
        for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
            float sum = 0.0f;
            for (int peer = 0; peer < world; ++peer)
                sum += static_cast<float>(reinterpret_cast<const T*>(buffers[peer])[(int64_t(rank) * rows + r) * hidden + c]);
            row[c] = sum / world;
            squares += row[c] * row[c];
        }
        for (int offset = 16; offset; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
        __syncthreads();
        float total = 0.0f;
        for (int warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
        const float scale = rsqrtf(total / hidden + eps);
        for (int c = threadIdx.x; c < hidden; c += blockDim.x)
            out[int64_t(r) * hidden + c] = static_cast<T>(row[c] * scale * gamma[c]);
        __syncthreads();
    }
    grid_meet(pads, rank, world, 2 * call);
}

torch::Tensor forward(torch::Tensor x, torch::Tensor gamma, double eps, torch::Tensor buffers, torch::Tensor pads, int64_t own,
                      int64_t rank, int64_t call) {
    TORCH_CHECK(x.device() == gamma.device(), "on one GPU");
    const int world = buffers.numel(), hidden = gamma.numel(), rows = x.numel() / world / hidden;
    auto out = torch::empty({rows, hidden}, x.options());
    auto stream = at::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(own), x.data_ptr(), x.nbytes(), cudaMemcpyDeviceToDevice, stream));
    int sms = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, x.get_device()));
    auto wide = gamma.to(torch::kFloat32);
    const size_t shared = hidden * sizeof(float);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm_rows", [&] {
        if (shared > 48 * 1024)
            C10_CUDA_CHECK(cudaFuncSetAttribute(rms_norm_rows<scalar_t>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
        rms_norm_rows<scalar_t><<<std::max(1, std::min(sms, rows)), 128, shared, stream>>>(
            reinterpret_cast<const uint64_t*>(buffers.data_ptr<int64_t>()), reinterpret_cast<const uint64_t*>(pads.data_ptr<int64_t>()),
            wide.data_ptr<float>(), out.data_ptr<scalar_t>(), rows, hidden, eps, rank, world, unsigned(call));
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("forward", &forward); }
"""

extension = load_inline("rs_rms_norm", cpp_sources=[""], cuda_sources=[SOURCE], extra_cuda_cflags=["-O3", "--use_fast_math"])
state = {}


def solution(rs_input_1d, gamma, eps):
    x = rs_input_1d.contiguous()
    key = (x.numel(), x.dtype)
    if key not in state:
        memory = symm_mem.empty(x.numel(), dtype=x.dtype, device=x.device)
        handle = symm_mem.rendezvous(memory, dist.group.WORLD)
        tables = [torch.tensor(pointers, dtype=torch.int64, device=x.device) for pointers in (handle.buffer_ptrs, handle.signal_pad_ptrs)]
        state[key] = [handle, *tables, 0]
    handle, buffers, pads, _ = state[key]
    state[key][3] += 1
    return extension.forward(x, gamma, eps, buffers, pads, handle.buffer_ptrs[handle.rank], handle.rank, state[key][3])
