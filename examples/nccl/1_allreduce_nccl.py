"""Problem 1, all-reduce (sum), by NCCL's device API: every rank sums its share of all inputs, and stores the sum to all ranks."""

import ctypes

import torch

from peerlane.device import nccl

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Every block has a barrier of its own with the same block of all ranks. The first says that all inputs are in their windows, the second
// that all sums are, and that nobody reads an input any more.
extern "C" __global__ void all_reduce(const __grid_constant__ ncclDevComm comm, ncclWindow_t data, ELEMENT* out, long long count) {
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
    const int ranks = comm.lsaSize;
    const long long share = (count + ranks - 1) / ranks, first = share * comm.lsaRank, end = min(first + share, count);
    // Block b of every rank reads and stores what block b of the others has put, or reads later: part b of each share.
    const long long part = (share + gridDim.x - 1) / gridDim.x, begin = first + part * blockIdx.x, last = min(begin + part, end);
    for (long long i = begin + threadIdx.x; i < last; i += blockDim.x) {
        float sum = 0;
        for (int rank = 0; rank < ranks; ++rank) sum += float(((const ELEMENT*)ncclGetLsaPointer(data, 0, rank))[i]);
        for (int rank = 0; rank < ranks; ++rank) ((ELEMENT*)ncclGetLsaPointer(data, 0, rank))[i] = ELEMENT(sum);
    }
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
    const ELEMENT* sums = (const ELEMENT*)ncclGetLocalPointer(data, 0);
    for (int rank = 0; rank < ranks; ++rank) {
        const long long from = share * rank + part * blockIdx.x, to = min(min(from + part, share * (rank + 1)), count);
        for (long long i = from + threadIdx.x; i < to; i += blockDim.x) out[i] = sums[i];
    }
}
"""
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# nvcc compiles when the file is imported, without a GPU; other types in the first call that has them.
PROGRAMS = {torch.bfloat16: nccl.compile(SOURCE, defines={"ELEMENT": TYPES[torch.bfloat16]})}
_state = {}  # (number of elements, dtype) -> window, kernel


def state_of(tensor):
    key = (tensor.numel(), tensor.dtype)
    if key not in _state:
        if tensor.dtype not in PROGRAMS:
            PROGRAMS[tensor.dtype] = nccl.compile(SOURCE, defines={"ELEMENT": TYPES[tensor.dtype]})
        world = nccl.world()  # collective, as windows are: in the first call, which all ranks make
        _state[key] = world, world.window(tensor.numel(), dtype=tensor.dtype), world.kernel(PROGRAMS[tensor.dtype], "all_reduce")
    return _state[key]


def solution(tensor):
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if tensor.numel() == 0:
        return out
    world, window, kernel = state_of(tensor)
    window.tensor.copy_(tensor.reshape(-1))
    blocks, threads = min(32, world.sm_count), min(512, world.max_threads)
    kernel.launch(blocks, threads, [world.comm, window, out, ctypes.c_int64(tensor.numel())])
    return out
