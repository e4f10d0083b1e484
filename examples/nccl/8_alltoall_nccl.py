"""Problem 8, all-to-all with equal blocks, by NCCL's device API: every rank stores its blocks to their owners' windows."""

import ctypes

import torch

from peerlane.device import nccl

SOURCE = r"""
// A block of threads moves the same part of every message, so the blocks of one number need a barrier of their own alone.
extern "C" __global__ void all_to_all(const __grid_constant__ ncclDevComm comm, ncclWindow_t inbox, const char* sent, char* received,
                                      long long bytes, int width) {
    const long long first = width * (blockIdx.x * (long long)blockDim.x + threadIdx.x), step = width * (long long)gridDim.x * blockDim.x;
    for (int i = 0; i < comm.lsaSize; ++i) {
        const int rank = (comm.lsaRank + i) % comm.lsaSize;  // every rank begins with another one
        char* to = (char*)ncclGetLsaPointer(inbox, comm.lsaRank * bytes, rank);
        const char* from = sent + rank * bytes;
        for (long long at = first; at < bytes; at += step) {
            if (width == 16) *(uint4*)(to + at) = *(const uint4*)(from + at);
            else to[at] = from[at];
        }
    }
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);  // all messages have arrived
    const char* own = (const char*)ncclGetLocalPointer(inbox, 0);
    for (int rank = 0; rank < comm.lsaSize; ++rank) {
        for (long long at = first; at < bytes; at += step) {
            if (width == 16) *(uint4*)(received + rank * bytes + at) = *(const uint4*)(own + rank * bytes + at);
            else received[rank * bytes + at] = own[rank * bytes + at];
        }
    }
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);  // all have read: the next call may store
}
"""
# nvcc compiles when the file is imported, without a GPU.
PROGRAM = nccl.compile(SOURCE)
_state = {}  # bytes -> window, kernel


def solution(tensor):
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    if tensor.numel() == 0:
        return received
    world = nccl.world()  # collective, as windows are: in the first call, which all ranks make
    if tensor.nbytes not in _state:
        _state[tensor.nbytes] = world.window(tensor.nbytes, dtype=torch.uint8), world.kernel(PROGRAM, "all_to_all")
    window, kernel = _state[tensor.nbytes]
    each = tensor.nbytes // world.world_size
    width = 16 if each % 16 == 0 and tensor.data_ptr() % 16 == 0 else 1
    blocks, threads = min(32, world.sm_count), min(512, world.max_threads)
    kernel.launch(blocks, threads, [world.comm, window, tensor, received, ctypes.c_int64(each), ctypes.c_int(width)])
    return received
