"""Five kernels of several ranks in plain CUDA C++, launched through cuda.core: ``BROKEN`` 0 is right, 1 and 2 have one fault each."""

import ctypes
from typing import Any

import cuda.core as core
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

THREADS, ROOM, FLAGS = 32, 2048, 64

SOURCE = r"""
typedef unsigned u32;
#define PARAMETERS float *const *data, u32 *const *pads, const float *x, float *out, u32 n, u32 rank, u32 ranks, u32 number

__device__ void signal(u32* pad, u32 slot, u32 number) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(pad + slot), "r"(number) : "memory");
}
__device__ void wait(const u32* pad, u32 slot, u32 number) {
    u32 seen;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(pad + slot) : "memory");
    while (int(seen - number) < 0);
}
// All ranks' blocks of this number meet.
__device__ void barrier(u32* const* pads, u32 rank, u32 ranks, u32 number) {
    __syncthreads();
    const u32 slot = blockIdx.x * ranks;
    if (threadIdx.x < ranks) {
        signal(pads[threadIdx.x], slot + rank, number);
        wait(pads[rank], slot + threadIdx.x, number);
    }
    __syncthreads();
}

extern "C" __global__ void one_shot(PARAMETERS) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[rank][i] = x[i];
    if (BROKEN != 1) barrier(pads, rank, ranks, number);  // the others' numbers may not be there
    float sum = 0;
    if (i < n) for (u32 r = 0; r < ranks; ++r) sum += data[r][i];
    if (i < n) out[i] = sum;
    if (BROKEN != 2) barrier(pads, rank, ranks, number + 1);  // the next call may overwrite what others read
}

extern "C" __global__ void two_shot(PARAMETERS) {
    const u32 first = blockIdx.x * blockDim.x * ranks + threadIdx.x;
    for (u32 r = 0, i = first; r < ranks; ++r, i += blockDim.x) if (i < n) data[rank][i] = x[i];
    barrier(pads, rank, ranks, number);
    const u32 mine = first + (BROKEN == 1 ? 0 : rank) * blockDim.x;  // everybody's share is the first
    float sum = 0;
    if (mine < n) for (u32 r = 0; r < ranks; ++r) sum += data[r][mine];
    if (BROKEN != 2) __syncthreads();
    if (mine < n) for (u32 r = 0; r < ranks; ++r) data[r][mine] = sum;
    if (BROKEN == 2) signal(pads[0], 60, number);  // in place of a barrier
    else barrier(pads, rank, ranks, number + 1);
    for (u32 r = 0, i = first; r < ranks; ++r, i += blockDim.x) if (i < n) out[i] = data[rank][i];
    barrier(pads, rank, ranks, number + 2);
}

extern "C" __global__ void gather(PARAMETERS) {
    const u32 width = n * gridDim.x;
    const u32 i = blockIdx.x * n + threadIdx.x;
    for (u32 r = 0; r < ranks; ++r) {
        if (threadIdx.x < n) data[r][rank * width + i] = x[i];
        if (BROKEN != 1) __syncthreads();  // one thread signals for all
        if (threadIdx.x == 0) signal(pads[r], blockIdx.x * ranks + rank, number);
    }
    for (u32 r = 0; r < ranks; ++r) {
        if (threadIdx.x == 0) wait(pads[rank], blockIdx.x * ranks + (BROKEN == 2 ? rank : r), number);  // for itself
        __syncthreads();
        if (threadIdx.x < n) out[r * width + i] = data[rank][r * width + i];
    }
    barrier(pads, rank, ranks, number + 1);
}

extern "C" __global__ void push(PARAMETERS) {
    const u32 after = (rank + 1) % ranks, i = threadIdx.x;
    __shared__ u32 slot;
    for (u32 token = 0; token < 2; ++token) {
        if (i == 0) slot = atomicAdd_system(pads[after] + 62, 1);
        __syncthreads();
        if (i < n) data[after][slot * n + i] = x[token * n + i];
        __syncthreads();
    }
    if (BROKEN == 1 && i == 0) pads[rank][62] = 0;  // the rank before may still count
    if (BROKEN != 2) barrier(pads, rank, ranks, number);  // tokens may still come
    float sum = 0;
    if (i < n) for (u32 s = 0; s < 2; ++s) sum += data[rank][s * n + i];
    if (i < n) out[i] = sum;
    if (BROKEN != 1 && i == 0) pads[rank][62] = 0;
    barrier(pads, rank, ranks, number + 1);
}

extern "C" __global__ void ring(PARAMETERS) {
    const u32 after = (rank + 1) % ranks, i = threadIdx.x;
    float passed = x[i], sum = passed;
    for (u32 step = 0; step + 1 < ranks; ++step) {
        const u32 buffer = BROKEN == 1 ? 0 : step * n;  // one buffer for all steps
        data[after][buffer + i] = passed;
        __threadfence_system();
        if (BROKEN != 2) __syncthreads();  // all threads have stored
        if (i == 0) signal(pads[after], 40, number + step), wait(pads[rank], 40, number + step);
        __syncthreads();
        passed = data[rank][buffer + i];
        sum += passed;
    }
    out[i] = sum;
    barrier(pads, rank, ranks, number + 8);
}
"""


def solution(name: str, broken: int) -> Any:
    """Returns a function of one rank that calls the kernel ``name`` on its inputs."""
    kept: dict[str, Any] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if not kept:
            core.Device().set_current()
            options = core.ProgramOptions(arch="sm_90a", std="c++20", define_macro=[("BROKEN", str(broken))])
            kept["kernel"] = core.Program(SOURCE, "c++", options).compile("cubin").get_kernel(name)
            memory = [symm_mem.empty(ROOM), symm_mem.empty(FLAGS, dtype=torch.int32)]
            kept["handles"], kept["number"] = [symm_mem.rendezvous(item, dist.group.WORLD) for item in memory], 0
        kept["number"] += 16
        blocks, n, out = shape(name, x, ranks)
        data, pads = kept["handles"]
        stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        numbers = map(ctypes.c_uint32, (n, rank, ranks, kept["number"]))
        tables = (data.buffer_ptrs_dev, pads.buffer_ptrs_dev, x.data_ptr(), out.data_ptr())
        core.launch(stream, core.LaunchConfig(grid=blocks, block=THREADS), kept["kernel"], *tables, *numbers)
        return out

    return call


def shape(name: str, x: torch.Tensor, ranks: int) -> tuple[int, int, torch.Tensor]:
    """Returns the blocks, the kernel's number n, and an empty result."""
    if name == "one_shot":
        return -(-x.numel() // THREADS), x.numel(), torch.zeros_like(x)
    if name == "two_shot":
        return -(-x.numel() // (THREADS * ranks)), x.numel(), torch.zeros_like(x)
    if name == "gather":
        return 2, x.numel() // 2, torch.zeros(ranks * x.numel())
    if name == "push":
        return 1, x.numel() // 2, torch.zeros(x.numel() // 2)
    return 1, x.numel(), torch.zeros_like(x)


def inputs(name: str, ranks: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns small whole numbers for each rank."""
    count = {"one_shot": 50, "two_shot": 100, "gather": 48, "push": 64, "ring": 32}[name]
    return [(torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(rank)).float(),) for rank in range(ranks)]


def expected(name: str, given: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Returns what each rank's kernel has to give."""
    x = torch.stack([arguments[0] for arguments in given])
    if name == "gather":
        return [x.flatten()] * len(given)
    if name == "push":
        return [x[rank - 1].view(2, -1).sum(0) for rank in range(len(given))]
    return [x.sum(0)] * len(given)
