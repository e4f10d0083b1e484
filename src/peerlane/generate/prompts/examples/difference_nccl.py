"""Every rank returns its tensor minus its left neighbour's: one kernel stores to the right, by a window of NCCL's device API."""

import ctypes

import torch

from peerlane.device import nccl

BLOCKS, THREADS = 32, 256  # all blocks must run at the same time, because they wait for other ranks
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Block b of every rank handles the same part of the tensor, so the blocks of one number are ordered by a barrier of their own.
extern "C" __global__ void difference(const __grid_constant__ ncclDevComm comm, ncclWindow_t window, const ELEMENT* x, ELEMENT* out,
                                      long long count) {
    const long long part = (count + gridDim.x - 1) / gridDim.x, first = min(part * blockIdx.x, count), end = min(first + part, count);
    const int right = (comm.lsaRank + 1) % comm.lsaSize;
    ELEMENT* inbox = (ELEMENT*)ncclGetLsaPointer(window, 0, right);
    for (long long i = first + threadIdx.x; i < end; i += blockDim.x) inbox[i] = x[i];
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);  // all ranks' stores have arrived
    const ELEMENT* own = (const ELEMENT*)ncclGetLocalPointer(window, 0);
    for (long long i = first + threadIdx.x; i < end; i += blockDim.x) out[i] = ELEMENT(float(x[i]) - float(own[i]));
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);  // all ranks have read: the next call may store
}
"""

# nvcc compiles when the file is imported, without a GPU; other types in the first call that has them.
PROGRAMS = {torch.bfloat16: nccl.compile(SOURCE, defines={"ELEMENT": TYPES[torch.bfloat16]})}
_state = {}  # (number of elements, dtype) -> window, kernel


def state_of(world, x):
    key = (x.numel(), x.dtype)
    if key not in _state:
        if x.dtype not in PROGRAMS:
            PROGRAMS[x.dtype] = nccl.compile(SOURCE, defines={"ELEMENT": TYPES[x.dtype]})
        _state[key] = world.window(max(x.numel(), 1), dtype=x.dtype), world.kernel(PROGRAMS[x.dtype], "difference")
    return _state[key]


def solution(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    world = nccl.world()  # starts in the first call, which all ranks make
    window, kernel = state_of(world, x)
    blocks, threads = min(BLOCKS, world.sm_count), min(THREADS, world.max_threads)
    # Tensors are passed as addresses; numbers are ctypes values, which say their width. The launch goes to PyTorch's current stream.
    kernel.launch(blocks, threads, [world.comm, window, x, out, ctypes.c_int64(x.numel())])
    return out
