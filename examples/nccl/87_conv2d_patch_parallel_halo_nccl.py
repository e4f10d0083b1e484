"""Problem 87, a convolution of stripes of an image, by NCCL's device API: neighbours store the rows at their borders."""

import ctypes

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device import nccl

SOURCE = r"""
// The window holds the rows from above, then those from below. Every block moves the same part of them on all ranks.
extern "C" __global__ void halo(const __grid_constant__ ncclDevComm comm, ncclWindow_t window, const char* top, const char* bottom,
                                char* above, char* below, long long bytes) {
    const int me = comm.lsaRank, last = comm.lsaSize - 1;
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
    if (me > 0) {
        char* to = (char*)ncclGetLsaPointer(window, bytes, me - 1);
        for (long long at = first; at < bytes; at += step) to[at] = top[at];
    }
    if (me < last) {
        char* to = (char*)ncclGetLsaPointer(window, 0, me + 1);
        for (long long at = first; at < bytes; at += step) to[at] = bottom[at];
    }
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);  // the neighbours' rows have arrived
    const char* own = (const char*)ncclGetLocalPointer(window, 0);
    for (long long at = first; at < bytes; at += step) {
        if (me > 0) above[at] = own[at];
        if (me < last) below[at] = own[bytes + at];
    }
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);  // the neighbours have read: the next call may store
}
"""
# nvcc compiles when the file is imported, without a GPU.
PROGRAM = nccl.compile(SOURCE)
_state = {}  # (ranks, bytes) -> window, kernel


def rows_of_neighbours(top, bottom, group):
    """The last rows of the rank above and the first ones of the rank below; zeros beyond the image."""
    above, below = torch.zeros_like(bottom), torch.zeros_like(top)
    if dist.get_world_size(group) == 1 or not top.numel():
        return above, below
    world = nccl.world(group)  # collective, as windows are: in the first call, which all ranks make
    key = world, top.nbytes
    if key not in _state:
        _state[key] = world.window(2 * top.nbytes, dtype=torch.uint8), world.kernel(PROGRAM, "halo")
    window, kernel = _state[key]
    blocks, threads = min(16, world.sm_count), min(512, world.max_threads)
    kernel.launch(blocks, threads, [world.comm, window, top, bottom, above, below, ctypes.c_int64(top.nbytes)])
    return above, below


def solution(x, weight, bias, stride=1, padding=1, group=None):
    top, bottom = x[:, :, :padding].contiguous(), x[:, :, x.shape[2] - padding :].contiguous()
    above, below = rows_of_neighbours(top, bottom, group)
    return F.conv2d(torch.cat([above, x, below], 2), weight, bias, stride=stride, padding=(0, padding))
