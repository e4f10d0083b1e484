"""Nearest neighbours: every rank picks the best of its shard for all queries and stores them at the rank that asks, which merges."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <pybind11/pybind11.h>
#include <cfloat>
#include <stdexcept>

// A rank's memory: the number of its queries, the queries, then the best values and labels that each rank has found for them.
struct Memory {
    char* base;
    int depth, k, most;
    __device__ long* count() const { return reinterpret_cast<long*>(base); }
    __device__ float* queries() const { return reinterpret_cast<float*>(base + 16); }
    __device__ float* values(int rank) const { return queries() + long(most) * depth + long(rank) * most * k; }
    __device__ long* labels(int rank, int world) const { return reinterpret_cast<long*>(values(world)) + long(rank) * most * k; }
};

__device__ void raise(unsigned* flag, unsigned value) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *reinterpret_cast<volatile unsigned*>(flag) = value;
    }
}
__device__ void wait(const unsigned* flag, unsigned value) {
    if (threadIdx.x == 0) {
        while (*reinterpret_cast<const volatile unsigned*>(flag) < value) {}
        __threadfence_system();
    }
    __syncthreads();
}

// The place of the largest of n scores, which a warp looks for.
__device__ int best_of(const float* scores, int n) {
    float best = -FLT_MAX;
    int place = 0;
    for (int i = threadIdx.x; i < n; i += 32)
        if (scores[i] > best) best = scores[i], place = i;
    for (int offset = 16; offset; offset /= 2) {
        const float other = __shfl_xor_sync(~0u, best, offset);
        const int there = __shfl_xor_sync(~0u, place, offset);
        if (other > best || (other == best && there < place)) best = other, place = there;
    }
    __syncwarp();
    return place;
}

template <typename T>
__global__ void publish(const T* queries, int count, Memory* all, unsigned* const* pads, int rank, int world, unsigned call) {
    const Memory own = all[rank];
    for (int i = threadIdx.x; i < count * own.depth; i += blockDim.x) own.queries()[i] = static_cast<float>(queries[i]);
    if (threadIdx.x == 0) *own.count() = count;
    for (int peer = 0; peer < world; ++peer) raise(pads[peer] + rank, call);
}

template <typename T>
__global__ void find(const T* rows, const long* labels, int n, Memory* all, unsigned* const* pads, int rank, int world, unsigned call) {
    extern __shared__ float scores[];
    const int peer = blockIdx.x;
    const Memory asks = all[peer];
    wait(pads[rank] + peer, call);
    for (int q = 0; q < *asks.count(); ++q) {
        for (int i = threadIdx.x; i < n; i += 32) {
            scores[i] = 0;
            for (int d = 0; d < asks.depth; ++d)
                scores[i] += asks.queries()[q * asks.depth + d] * static_cast<float>(rows[long(d) * n + i]);
        }
        __syncwarp();
        for (int j = 0; j < asks.k; ++j) {
            const int place = best_of(scores, n);
            if (threadIdx.x == 0) {
                asks.values(rank)[q * asks.k + j] = scores[place];
                asks.labels(rank, world)[q * asks.k + j] = labels[place];
                scores[place] = -FLT_MAX;
            }
            __syncwarp();
        }
    }
    raise(pads[peer] + world + rank, call);
}

template <typename T>
__global__ void merge(T* values, long* labels, Memory* all, const unsigned* pad, int rank, int world, unsigned call) {
    extern __shared__ float scores[];
    const Memory own = all[rank];
    const int q = blockIdx.x;
    for (int peer = 0; peer < world; ++peer) wait(pad + world + peer, call);
    for (int i = threadIdx.x; i < world * own.k; i += 32) scores[i] = own.values(i / own.k)[q * own.k + i % own.k];
    __syncwarp();
    for (int j = 0; j < own.k; ++j) {
        const int place = best_of(scores, world * own.k);
        if (threadIdx.x == 0) {
            values[q * own.k + j] = static_cast<T>(scores[place]);
            labels[q * own.k + j] = own.labels(place / own.k, world)[q * own.k + place % own.k];
            scores[place] = -FLT_MAX;
        }
        __syncwarp();
    }
}

template <typename T>
void search(uintptr_t queries, int count, uintptr_t rows, uintptr_t labels, int n, uintptr_t memory, uintptr_t pads, uintptr_t pad,
            uintptr_t values, uintptr_t out, int k, int rank, int world, unsigned call) {
    auto* all = reinterpret_cast<Memory*>(memory);
    auto* flags = reinterpret_cast<unsigned* const*>(pads);
    publish<T><<<1, 64>>>((const T*)queries, count, all, flags, rank, world, call);
    find<T><<<world, 32, n * sizeof(float)>>>((const T*)rows, (const long*)labels, n, all, flags, rank, world, call);
    if (count)
        merge<T><<<count, 32, world * k * sizeof(float)>>>((T*)values, (long*)out, all, (const unsigned*)pad, rank, world, call);
    if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("a launch failed");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("float32", &search<float>);
    m.def("bfloat16", &search<__nv_bfloat16>);
    m.def("float16", &search<__half>);
}
"""

FLAGS = ["-O3", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "-U__CUDA_NO_HALF_CONVERSIONS__"]
MOST = 256  # queries of a rank
extension = load_inline("knn", "", SOURCE, extra_cuda_cflags=FLAGS, no_implicit_headers=True)
state = {}


def solution(test_features_rank, train_features_rank_T, train_labels_rank, max_k, group=None):
    queries, rows, labels = (x.contiguous() for x in (test_features_rank, train_features_rank_T, train_labels_rank))
    (count, depth), n, device = queries.shape, rows.shape[1], queries.device
    if max_k > n:
        raise ValueError(f"k is {max_k}, and a shard has {n} rows")
    assert count <= MOST
    group = group or dist.group.WORLD
    key = group, depth, max_k
    if key not in state:
        world = dist.get_world_size(group)
        memory = symm_mem.empty(16 + 4 * MOST * depth + 12 * world * MOST * max_k, dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(memory, group)
        sizes = depth | max_k << 32  # two ints of the struct in the kernel
        table = torch.tensor([[pointer, sizes, MOST] for pointer in handle.buffer_ptrs], device=device)
        state[key] = [handle, table, 0]
    handle, table, _ = state[key]
    state[key][2] += 1
    values = queries.new_empty(count, max_k)
    out = torch.empty(count, max_k, dtype=torch.int64, device=device)
    search = getattr(extension, str(queries.dtype).removeprefix("torch."))
    pads = handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs[handle.rank]
    arguments = labels.data_ptr(), n, table.data_ptr(), *pads, values.data_ptr(), out.data_ptr(), max_k
    search(queries.data_ptr(), count, rows.data_ptr(), *arguments, handle.rank, handle.world_size, state[key][2])
    return values, out
