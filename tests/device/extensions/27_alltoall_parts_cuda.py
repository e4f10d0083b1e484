"""All-to-all with unequal parts: every rank publishes its rows and where its parts begin, and takes its part of every peer's rows."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <cstdint>

__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// A rank's memory: where its parts begin, in bytes, then its rows. Its pad: rank r has published call n; from `world` on: has taken it.
__global__ void publish(const char* rows, const int64_t* starts, int64_t bytes, char* const* memory, uint32_t* const* pads, int rank,
                        int world, uint32_t call) {
    uint32_t* taken = pads[rank] + world;
    if (threadIdx.x < world) while (load_acquire(taken + threadIdx.x) < call - 1) {}
    __syncthreads();
    int64_t* head = reinterpret_cast<int64_t*>(memory[rank]);
    if (threadIdx.x < world) head[threadIdx.x] = starts[threadIdx.x];
    char* to = memory[rank] + 8 * world;
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = rows[i];
    __syncthreads();
    if (threadIdx.x < world) store_release(pads[threadIdx.x] + rank, call);
}

__global__ void take(char* out, const int64_t* sizes, char* const* memory, uint32_t* const* pads, int rank, int world, uint32_t call) {
    const int peer = blockIdx.x;
    if (threadIdx.x == 0) while (load_acquire(pads[rank] + peer) < call) {}
    __syncthreads();
    for (int before = 0; before < peer; ++before) out += sizes[before];
    const char* from = memory[peer] + 8 * world + reinterpret_cast<const int64_t*>(memory[peer])[rank];
    for (int64_t i = threadIdx.x; i < sizes[peer]; i += blockDim.x) out[i] = from[i];
    __syncthreads();
    if (threadIdx.x == 0) store_release(pads[peer] + world + rank, call);
}

void all_to_all(uintptr_t rows, uintptr_t starts, int64_t bytes, uintptr_t out, uintptr_t sizes, uintptr_t memory, uintptr_t pads,
                int rank, int world, uint32_t call, uintptr_t stream) {
    auto* all = reinterpret_cast<char* const*>(memory);
    auto* flags = reinterpret_cast<uint32_t* const*>(pads);
    auto on = reinterpret_cast<cudaStream_t>(stream);
    publish<<<1, 128, 0, on>>>((const char*)rows, (const int64_t*)starts, bytes, all, flags, rank, world, call);
    take<<<world, 64, 0, on>>>((char*)out, (const int64_t*)sizes, all, flags, rank, world, call);
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("all_to_all", &all_to_all); }
"""

CAPACITY = 64 << 20
extension = load_inline("all_to_all_parts", "", SOURCE, extra_cuda_cflags=["-O3"], no_implicit_headers=True)
state = {}


def solution(local_tensor, input_split_sizes=None, output_split_sizes=None, group=None):
    group = group or dist.group.WORLD
    world = dist.get_world_size(group)
    x = local_tensor.contiguous()
    if world == 1:
        return x
    if group not in state:
        memory = symm_mem.empty(CAPACITY, dtype=torch.uint8, device=x.device)
        state[group] = [symm_mem.rendezvous(memory, group), 0]
    handle = state[group][0]
    state[group][1] += 1
    width = x[:1].nbytes if x.shape[0] else x.new_empty((1, *x.shape[1:])).nbytes
    sent, received = (
        torch.as_tensor([x.shape[0] // world] * world if sizes is None else sizes, dtype=torch.int64, device=x.device)
        for sizes in (input_split_sizes, output_split_sizes)
    )
    assert 8 * world + x.nbytes <= CAPACITY
    out = x.new_empty((int(received.sum()), *x.shape[1:]))
    starts, sizes = (sent.cumsum(0) - sent) * width, received * width
    extension.all_to_all(
        x.data_ptr(),
        starts.data_ptr(),
        x.nbytes,
        out.data_ptr(),
        sizes.data_ptr(),
        handle.buffer_ptrs_dev,
        handle.signal_pad_ptrs_dev,
        handle.rank,
        world,
        state[group][1],
        torch.cuda.current_stream().cuda_stream,
    )
    return out
