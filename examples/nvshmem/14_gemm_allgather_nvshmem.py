"""Problem 14, a product whose columns are gathered, by NVSHMEM: the kernel that computes rows of the product puts them to every rank."""

import ctypes

import torch
import torch.distributed as dist

from peerlane.device import nvshmem

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int ROWS = 16, COLUMNS = 64, DEPTH = 32;  // of a block's tiles; 256 threads, each of which sums four elements

// Rows [16 panel, ...) of A (m, k) @ B (k, n), rounded once, to this rank's block.
__device__ void panel_product(const ELEMENT* a, const ELEMENT* b, ELEMENT* block, long long m, long long n, long long k, long long panel) {
    __shared__ float left[ROWS][DEPTH], right[DEPTH][COLUMNS];
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    for (long long n0 = 0; n0 < n; n0 += COLUMNS) {
        float sum[4] = {};
        for (long long k0 = 0; k0 < k; k0 += DEPTH) {
            for (int at = threadIdx.x; at < ROWS * DEPTH; at += blockDim.x) {
                const long long y = panel * ROWS + at / DEPTH, x = k0 + at % DEPTH;
                left[at / DEPTH][at % DEPTH] = y < m && x < k ? float(a[y * k + x]) : 0.0f;
            }
            for (int at = threadIdx.x; at < DEPTH * COLUMNS; at += blockDim.x) {
                const long long y = k0 + at / COLUMNS, x = n0 + at % COLUMNS;
                right[at / COLUMNS][at % COLUMNS] = y < k && x < n ? float(b[y * n + x]) : 0.0f;
            }
            __syncthreads();
            const int depth = k - k0 < DEPTH ? k - k0 : DEPTH;  // what lies beyond may be Inf times 0
            for (int z = 0; z < depth; ++z) {
                for (int j = 0; j < 4; ++j) sum[j] += left[row][z] * right[z][column + 16 * j];
            }
            __syncthreads();
        }
        for (int j = 0; j < 4; ++j) {
            const long long y = panel * ROWS + row, x = n0 + column + 16 * j;
            if (y < m && x < n) block[y * n + x] = ELEMENT(sum[j]);
        }
    }
}

// Every panel of rows is put as soon as it is there, while other blocks still compute. Then blocks collect the panels of all ranks.
extern "C" __global__ void gemm_push(const ELEMENT* a, const ELEMENT* b, ELEMENT* own, ELEMENT* inbox, uint64_t* signals,
                                     const uint64_t* rounds, ELEMENT* out, long long m, long long n, long long k) {
    const int me = nvshmem_my_pe(), ranks = nvshmem_n_pes();
    const uint64_t round = *rounds;
    const long long panels = (m + ROWS - 1) / ROWS;
    ELEMENT* box = inbox + (round & 1) * ranks * m * n;
    for (long long panel = blockIdx.x; panel < panels; panel += gridDim.x) {
        panel_product(a, b, own, m, n, k, panel);
        __syncthreads();
        const long long first = panel * ROWS * n, count = min((long long)ROWS, m - panel * ROWS) * n;
        for (int step = 0; step < ranks; ++step) {
            const int peer = (me + step) % ranks;
            nvshmemx_putmem_signal_nbi_block(box + me * m * n + first, own + first, count * sizeof(ELEMENT), signals + me * panels + panel,
                                             round, NVSHMEM_SIGNAL_SET, peer);
        }
    }
    for (long long panel = blockIdx.x; panel < panels; panel += gridDim.x) {
        const long long last = min((panel + 1) * ROWS, m);
        for (int peer = 0; peer < ranks; ++peer) {
            if (threadIdx.x == 0) peerlane::wait_signal(signals + peer * panels + panel, round);  // ten seconds at most
            __syncthreads();
            for (long long at = panel * ROWS * n + threadIdx.x; at < last * n; at += blockDim.x) {
                out[at / n * ranks * n + peer * n + at % n] = box[peer * m * n + at];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_quiet();  // the own block may be written again
}
"""
BLOCKS = 32  # at most: all of them run at the same time
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float32: "float", torch.float16: "__half"}
# NVRTC and nvJitLink compile when the file is imported, without a GPU.
PROGRAMS = {torch.bfloat16: nvshmem.compile(SOURCE, defines={"ELEMENT": "__nv_bfloat16"})}
_state = {}  # (m, n, dtype) -> symmetric memory, rounds, the kernel


def state_of(m, n, dtype):
    """Made in the first call with these sizes, which is collective. A message of round r + 2 follows the signal of round r + 1."""
    if (m, n, dtype) not in _state:
        if dtype not in PROGRAMS:
            PROGRAMS[dtype] = nvshmem.compile(SOURCE, defines={"ELEMENT": TYPES[dtype]})
        world = nvshmem.world()
        own, inbox = world.empty(m, n, dtype=dtype), world.empty(2 * world.world_size, m, n, dtype=dtype)
        signals = world.zeros(world.world_size * -(-m // 16), dtype=torch.int64)
        rounds = torch.zeros(1, dtype=torch.int64, device=world.device)
        _state[m, n, dtype] = own, inbox, signals, rounds, world.kernel(PROGRAMS[dtype], "gemm_push")
    return _state[m, n, dtype]


def solution(A, B):
    (m, k), n = A.shape, B.shape[1]
    A, B, out = A.contiguous(), B.contiguous(), A.new_empty((m, n * dist.get_world_size()))
    if out.numel():
        own, inbox, signals, rounds, kernel = state_of(m, n, A.dtype)
        rounds += 1
        sizes = [ctypes.c_int64(size) for size in (m, n, k)]
        kernel.launch(min(BLOCKS, -(-m // 16)), 256, [A, B, own, inbox, signals, rounds, out, *sizes])
    return out
