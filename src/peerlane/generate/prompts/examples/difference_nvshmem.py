"""Every rank returns its tensor minus its left neighbour's: one kernel puts to the right, signals, and waits for the left, by NVSHMEM."""

import ctypes

import torch
import torch.distributed as dist

from peerlane.device import nvshmem

BLOCKS, THREADS = 32, 256  # all blocks must run at the same time, because they wait for other ranks
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Signal b of a rank: part b of the left neighbour's data has come. Signal gridDim.x + b: the right neighbour has read its part b.
extern "C" __global__ void difference(const ELEMENT* x, ELEMENT* out, ELEMENT* outbox, ELEMENT* inbox, uint64_t* signals, uint64_t* epochs,
                                      long long count) {
    const int me = nvshmem_my_pe(), ranks = nvshmem_n_pes(), left = (me + ranks - 1) % ranks, right = (me + 1) % ranks;
    const long long part = (count + gridDim.x - 1) / gridDim.x, first = min(part * blockIdx.x, count), end = min(first + part, count);
    const uint64_t epoch = epochs[blockIdx.x] + 1;  // lives on the device, so a captured graph can be replayed
    uint64_t *arrived = signals + blockIdx.x, *read = signals + gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) peerlane::wait_signal(read, epoch - 1);  // the right neighbour has read what was put before
    for (long long i = first + threadIdx.x; i < end; i += blockDim.x) outbox[i] = x[i];  // what is put lies in symmetric memory
    __syncthreads();
    if (end > first) {  // data, then the signal
        nvshmemx_putmem_signal_nbi_block(
            inbox + first, outbox + first, (end - first) * sizeof(ELEMENT), arrived, epoch, NVSHMEM_SIGNAL_SET, right);
        if (threadIdx.x == 0) peerlane::wait_signal(arrived, epoch);  // ten seconds at most: then the kernel traps instead of hanging
    }
    __syncthreads();
    for (long long i = first + threadIdx.x; i < end; i += blockDim.x) out[i] = ELEMENT(float(x[i]) - float(inbox[i]));
    __syncthreads();
    if (threadIdx.x == 0) {
        nvshmemx_signal_op(read, epoch, NVSHMEM_SIGNAL_SET, left);
        nvshmem_quiet();  // all that this block has put is done: the outbox may be written again
        epochs[blockIdx.x] = epoch;
    }
}
"""

# NVRTC and nvJitLink compile when the file is imported, without a GPU; other types in the first call that has them.
PROGRAMS = {torch.bfloat16: nvshmem.compile(SOURCE, defines={"ELEMENT": TYPES[torch.bfloat16]})}
_state = {}  # (number of elements, dtype) -> symmetric tensors, epochs, the kernel


def state_of(x):
    key = (x.numel(), x.dtype)
    if key not in _state:
        world = nvshmem.world()  # starts NVSHMEM in the first call, which all ranks make
        if x.dtype not in PROGRAMS:
            PROGRAMS[x.dtype] = nvshmem.compile(SOURCE, defines={"ELEMENT": TYPES[x.dtype]})
        outbox, inbox = (world.empty(max(x.numel(), 1), dtype=x.dtype) for _ in range(2))
        signals = world.zeros(2 * BLOCKS, dtype=torch.int64)
        epochs = torch.zeros(BLOCKS, dtype=torch.int64, device=x.device)
        _state[key] = outbox, inbox, signals, epochs, world.kernel(PROGRAMS[x.dtype], "difference")
    return _state[key]


def solution(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if dist.get_world_size() == 1:
        return out.zero_()
    outbox, inbox, signals, epochs, kernel = state_of(x)
    # Tensors are passed as addresses; numbers are ctypes values, which say their width. The launch goes to PyTorch's current stream.
    kernel.launch(BLOCKS, THREADS, [x, out, outbox, inbox, signals, epochs, ctypes.c_int64(x.numel())])
    return out
