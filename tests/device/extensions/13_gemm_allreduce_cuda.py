"""Matrix product in shared memory and all-reduce: tiles go to symmetric memory in float32, and every rank adds up all of them."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

CPP = """
torch::Tensor gemm_all_reduce(torch::Tensor a, torch::Tensor b, std::vector<int64_t> buffers, std::vector<int64_t> pads, int64_t rank);
"""
SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ATen/cuda/CUDAContext.h>

constexpr int TILE = 8;
struct Tables { float* sums[8]; unsigned* pads[8]; };

template <typename T>
__global__ void product(const T* __restrict__ a, const T* __restrict__ b, float* __restrict__ c, int m, int n, int k) {
    __shared__ float left[TILE][TILE], right[TILE][TILE + 1];
    const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int begin = 0; begin < k; begin += TILE) {
        const int i = begin + threadIdx.x, j = begin + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = row < m && i < k ? float(a[row * k + i]) : 0.0f;
        right[threadIdx.y][threadIdx.x] = j < k && column < n ? float(b[j * n + column]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TILE; ++t) sum += left[threadIdx.y][t] * right[t][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

__global__ void wait_for_all(Tables tables, int rank, int world) {
    const int peer = threadIdx.x;
    if (peer >= world) return;
    __threadfence_system();
    atomicAdd_system(tables.pads[peer] + rank, 1u);
    const unsigned mine = atomicAdd_system(tables.pads[rank] + world + peer, 1u) + 1;
    while (atomicAdd_system(tables.pads[rank] + peer, 0u) < mine) __nanosleep(100);
    __threadfence_system();
}

template <typename T>
__global__ void add_up(Tables tables, T* out, int count, int world) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int r = 0; r < world; ++r) sum += tables.sums[r][i];
        out[i] = T(sum);
    }
}

torch::Tensor gemm_all_reduce(torch::Tensor a, torch::Tensor b, std::vector<int64_t> buffers, std::vector<int64_t> pads, int64_t rank) {
    TORCH_CHECK(a.is_cuda() && b.is_cuda() && a.size(1) == b.size(0), "expected matrices on a GPU that fit");
    const int m = a.size(0), k = a.size(1), n = b.size(1), world = buffers.size();
    auto out = torch::zeros({m, n}, a.options());
    if (m * n == 0) return out;
    Tables tables;
    for (int r = 0; r < world; ++r) {
        tables.sums[r] = reinterpret_cast<float*>(buffers[r]);
        tables.pads[r] = reinterpret_cast<unsigned*>(pads[r]);
    }
    auto stream = at::cuda::getCurrentCUDAStream();
    const dim3 grid((n + TILE - 1) / TILE, (m + TILE - 1) / TILE), block(TILE, TILE);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "gemm_all_reduce", ([&] {
        product<scalar_t><<<grid, block, 0, stream>>>(a.data_ptr<scalar_t>(), b.data_ptr<scalar_t>(), tables.sums[rank], m, n, k);
        wait_for_all<<<1, 32, 0, stream>>>(tables, rank, world);
        add_up<scalar_t><<<2, 64, 0, stream>>>(tables, out.data_ptr<scalar_t>(), m * n, world);
        wait_for_all<<<1, 32, 0, stream>>>(tables, rank, world);
    }));
    return out;
}
"""

extension = load_inline(
    "gemm_all_reduce", CPP, SOURCE, functions=["gemm_all_reduce"], extra_cuda_cflags=["-O3", "--use_fast_math"], with_cuda=True
)
handles = {}


def solution(A_local, B_local):
    a, b = A_local.contiguous(), B_local.contiguous()
    count = max(a.shape[0] * b.shape[1], 1)
    if count not in handles:
        buffer = symm_mem.empty(count, device=a.device, dtype=torch.float32)
        handles[count] = symm_mem.rendezvous(buffer, dist.group.WORLD.group_name)
        handles[count].barrier()
    handle = handles[count]
    return extension.gemm_all_reduce(a, b, handle.buffer_ptrs, handle.signal_pad_ptrs, handle.rank)
