"""All-reduce by two compilers: an extension has kernels that signal the peers and wait for them, and a Triton kernel sums the buffers."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>

// Thread r tells rank r how far this rank is: a word of rank r's pad, behind all that this rank's stream has written.
__global__ void tell(unsigned* const* pads, int first, int rank, int world, unsigned step) {
    if (threadIdx.x >= world) return;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(pads[threadIdx.x] + first + rank), "r"(step) : "memory");
}

// Thread r waits until rank r is as far.
__global__ void wait(unsigned* const* pads, int first, int rank, int world, unsigned step) {
    if (threadIdx.x >= world) return;
    unsigned seen;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(pads[rank] + first + threadIdx.x) : "memory");
    } while (seen < step);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("tell", [](std::int64_t pads, int first, int rank, int world, unsigned step) {
        tell<<<1, 32>>>(reinterpret_cast<unsigned* const*>(pads), first, rank, world, step);
    });
    m.def("wait", [](std::int64_t pads, int first, int rank, int world, unsigned step) {
        wait<<<1, 32>>>(reinterpret_cast<unsigned* const*>(pads), first, rank, world, step);
    });
}
"""

signals = load_inline("signals", cpp_sources="", cuda_sources=SOURCE, no_implicit_headers=True)
BLOCK = 128


@triton.jit
def copy(x, buffer, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + at, tl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit
def sum_of_all(buffers, out, numel, world: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    table = buffers.to(tl.pointer_type(tl.uint64))
    for rank in tl.static_range(world):
        buffer = tl.load(table + rank).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(buffer + at, mask=at < numel, other=0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < numel)


state = {}


def solution(tensor: torch.Tensor) -> torch.Tensor:
    numel, rank, world = tensor.numel(), dist.get_rank(), dist.get_world_size()
    key = numel, tensor.dtype
    if key not in state:
        buffer = symm_mem.empty(max(numel, 1), dtype=tensor.dtype, device=tensor.device)
        state[key] = [buffer, symm_mem.rendezvous(buffer, dist.group.WORLD), 0]
    buffer, handle, _ = state[key]
    state[key][2] = step = state[key][2] + 1
    pads, out = handle.signal_pad_ptrs_dev, torch.empty_like(tensor)
    grid = (max(1, triton.cdiv(numel, BLOCK)),)
    copy[grid](tensor, buffer, numel, BLOCK=BLOCK)
    signals.tell(pads, 0, rank, world, step)
    signals.wait(pads, 0, rank, world, step)
    sum_of_all[grid](handle.buffer_ptrs_dev, out, numel, world=world, BLOCK=BLOCK)
    signals.tell(pads, world, rank, world, step)  # this rank has read all buffers
    signals.wait(pads, world, rank, world, step)
    return out
