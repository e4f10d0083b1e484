"""Dispatch of tokens to experts by push: a block a row stores it in the memory of the expert's rank, and counts it there."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <algorithm>
#include <cstdint>

// Rows of rank r lie from r * capacity on; the pad counts rows by the rank that has sent them, over all calls.
__global__ void push_rows(const char* tokens, const int64_t* mapping, const int64_t* bounds, char* const* memory, uint32_t* const* pads,
                          int width, int64_t capacity, int rank, int world) {
    const int row = blockIdx.x;
    int peer = 0;
    if (row >= bounds[world]) return;
    while (row >= bounds[peer + 1]) ++peer;
    const char* from = tokens + mapping[row] * width;
    char* to = memory[peer] + (rank * capacity + row - bounds[peer]) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(pads[peer] + rank) : "memory");
}

// A block a row that arrives: sources[row] is its place in the memory, counts[source] the rows that have been sent by then.
__global__ void sort_rows(const char* memory, const int64_t* sources, const int64_t* counts, const uint32_t* pad, char* out, int rows,
                          int width, int64_t capacity) {
    if (blockIdx.x >= rows) return;
    const int64_t place = sources[blockIdx.x];
    const int source = place / capacity;
    if (threadIdx.x == 0) {
        uint32_t seen;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(pad + source) : "memory"); while (seen < counts[source]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[int64_t(blockIdx.x) * width + i] = memory[place * width + i];
}

void push(uintptr_t tokens, uintptr_t mapping, int rows, uintptr_t bounds, uintptr_t memory, uintptr_t pads, int width, int64_t capacity,
          int rank, int world, uintptr_t stream) {
    push_rows<<<std::max(rows, 1), 32, 0, (cudaStream_t)stream>>>((const char*)tokens, (const int64_t*)mapping, (const int64_t*)bounds,
        (char* const*)memory, (uint32_t* const*)pads, width, capacity, rank, world);
    if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("push_rows");
}

void sort(uintptr_t memory, uintptr_t sources, uintptr_t counts, uintptr_t pad, uintptr_t out, int rows, int width, int64_t capacity,
          uintptr_t stream) {
    sort_rows<<<std::max(rows, 1), 32, 0, (cudaStream_t)stream>>>((const char*)memory, (const int64_t*)sources, (const int64_t*)counts,
        (const uint32_t*)pad, (char*)out, rows, width, capacity);
    if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("sort_rows");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("push", &push);
    m.def("sort", &sort);
}
"""

CAPACITY = 64 << 20
extension = load_inline(
    name="moe_push",
    cpp_sources="",
    cuda_sources=SOURCE,
    extra_cuda_cflags=["-O3", "-std=c++17", "--expt-relaxed-constexpr"],
    with_cuda=True,
    no_implicit_headers=True,
)
state = {}


class Inbox:
    def __init__(self, group, device):
        self.memory = symm_mem.empty(CAPACITY, dtype=torch.uint8, device=device)
        self.handle = symm_mem.rendezvous(self.memory, group)
        self.counts = torch.zeros(self.handle.world_size, dtype=torch.int64, device=device)


def solution(hidden_states, expert_mask, num_experts, input_splits, output_splits, num_global_tokens_per_local_expert, group=None):
    group = group or dist.group.WORLD
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
    device = tokens.device
    if group not in state:
        state[group] = Inbox(group, device)
    inbox, stream = state[group], torch.cuda.current_stream().cuda_stream
    handle = inbox.handle
    sent, received = (torch.as_tensor(splits, dtype=torch.int64, device=device) for splits in (input_splits, output_splits))
    routing_map = expert_mask.sum(dim=1)
    mapping = torch.nonzero(routing_map)[:, 1].contiguous()
    bounds = torch.cat([sent.new_zeros(1), sent.cumsum(0)])
    width = tokens.shape[1] * tokens.element_size()
    capacity = CAPACITY // handle.world_size // width

    handle.barrier(channel=1)  # all have sorted what the last call sent
    pointers = handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev
    rank, world = handle.rank, handle.world_size
    extension.push(tokens.data_ptr(), mapping.data_ptr(), len(mapping), bounds.data_ptr(), *pointers, width, capacity, rank, world, stream)

    lengths = num_global_tokens_per_local_expert.to(device)  # by source and expert
    ends = lengths.cumsum(1)
    places = [
        torch.arange(int(end - length), int(end), device=device) + source * capacity
        for expert in range(lengths.shape[1])
        for source, (end, length) in enumerate(zip(ends[:, expert], lengths[:, expert], strict=True))
    ]
    sources = torch.cat(places)
    out = tokens.new_empty((len(sources), tokens.shape[1]))
    inbox.counts += received
    pad = handle.signal_pad_ptrs[rank]
    extension.sort(
        inbox.memory.data_ptr(), sources.data_ptr(), inbox.counts.data_ptr(), pad, out.data_ptr(), len(out), width, capacity, stream
    )
    return out, routing_map, mapping, tokens.shape
