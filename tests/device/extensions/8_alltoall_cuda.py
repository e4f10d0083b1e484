"""All-to-all in one cooperative launch: the grid and the ranks meet between the copy to symmetric memory and the reads of all parts."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cooperative_groups.h>
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
namespace cg = cooperative_groups;

__global__ void all_to_all(
    const char* in, char* out, long bytes, const long* buffers, const long* pads, int rank, int world, unsigned call) {
    cg::grid_group grid = cg::this_grid();
    char* own = reinterpret_cast<char*>(buffers[rank]);
    for (long i = grid.thread_rank(); i < bytes * world; i += grid.size()) own[i] = in[i];
    grid.sync();
    if (grid.thread_rank() < world) {
        const int peer = grid.thread_rank();
        __threadfence_system();
        atomicExch_system(reinterpret_cast<unsigned*>(pads[peer]) + rank, 2 * call - 1);
        while (atomicAdd_system(reinterpret_cast<unsigned*>(pads[rank]) + peer, 0u) < 2 * call - 1) {}
        __threadfence_system();
    }
    grid.sync();
    for (int peer = 0; peer < world; ++peer) {
        const char* from = reinterpret_cast<const char*>(buffers[peer]) + rank * bytes;
        for (long i = grid.thread_rank(); i < bytes; i += grid.size()) out[peer * bytes + i] = from[i];
    }
    grid.sync();
    if (grid.thread_rank() < world) {  // nobody writes the next input before all have read this one
        const int peer = grid.thread_rank();
        __threadfence_system();  // the reads are over
        atomicExch_system(reinterpret_cast<unsigned*>(pads[peer]) + rank, 2 * call);
        while (atomicAdd_system(reinterpret_cast<unsigned*>(pads[rank]) + peer, 0u) < 2 * call) {}
        __threadfence_system();
    }
}

torch::Tensor exchange(torch::Tensor x, int64_t buffers, int64_t pads, int64_t rank, int64_t world, int64_t call) {
    auto out = torch::empty_like(x);
    const char* in = static_cast<const char*>(x.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    long bytes = x.nbytes() / world;
    const long *from = reinterpret_cast<const long*>(buffers), *signals = reinterpret_cast<const long*>(pads);
    int own = rank, ranks = world, blocks = 0;
    unsigned number = call;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, all_to_all, 64, 0));
    const int grid = std::min(blocks, 2) * std::min(2, at::cuda::getCurrentDeviceProperties()->multiProcessorCount);
    void* arguments[] = {&in, &to, &bytes, &from, &signals, &own, &ranks, &number};
    C10_CUDA_CHECK(cudaLaunchCooperativeKernel(all_to_all, dim3(grid), dim3(64), arguments, 0, at::cuda::getCurrentCUDAStream()));
    return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("exchange", &exchange); }
"""

extension = load_inline("all_to_all", "", SOURCE, extra_cuda_cflags=["-O2"])
state = {}


def solution(tensor):
    x = tensor.contiguous()
    if x.nbytes not in state:
        memory = symm_mem.empty(max(x.nbytes, 1), dtype=torch.uint8, device=x.device)
        state[x.nbytes] = [symm_mem.rendezvous(memory, dist.group.WORLD), 0]
    handle = state[x.nbytes][0]
    state[x.nbytes][1] += 1
    return extension.exchange(x, handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, handle.rank, handle.world_size, state[x.nbytes][1])
