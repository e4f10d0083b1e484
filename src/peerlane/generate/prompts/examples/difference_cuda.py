"""Every rank returns its tensor minus its left neighbour's: one CUDA kernel that writes to the right and waits for the left."""

import os

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch
from cuda.pathfinder import find_nvidia_header_directory

BLOCKS, THREADS = 64, 256  # all blocks must run at the same time, because they wait for other ranks
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ void raise_flag(unsigned* flag, unsigned number) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}

// Ten seconds at most: a lost signal ends the kernel instead of hanging the node.
__device__ void wait_for(const unsigned* flag, unsigned number) {
    unsigned seen;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - start > 10000000000ull) __trap();
    } while (static_cast<int>(seen - number) < 0);
}

// Flag b of a pad: block b's data has come from the left. Flag gridDim.x + b: the right neighbour has read it.
template <class T>
__global__ void difference(const T* x, T* out, long long count, T* own_data, T* right_data, unsigned* own_pad, unsigned* left_pad,
                           unsigned* right_pad, unsigned* epochs) {
    const unsigned epoch = epochs[blockIdx.x] + 1;  // lives on the device, so a captured graph can be replayed
    if (threadIdx.x == 0) wait_for(own_pad + gridDim.x + blockIdx.x, epoch - 1);  // the right neighbour has read what was sent before
    __syncthreads();
    const long long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (long long i = first; i < count; i += step) right_data[i] = x[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        raise_flag(right_pad + blockIdx.x, epoch);
        wait_for(own_pad + blockIdx.x, epoch);
    }
    __syncthreads();
    for (long long i = first; i < count; i += step) out[i] = T(float(x[i]) - float(__ldcv(own_data + i)));
    __syncthreads();
    if (threadIdx.x == 0) {
        raise_flag(left_pad + gridDim.x + blockIdx.x, epoch);
        epochs[blockIdx.x] = epoch;
    }
}
"""

# NVRTC compiles when the file is imported, in less than a second and without a GPU.
OPTIONS = ProgramOptions(arch="sm_90a", std="c++20", include_path=find_nvidia_header_directory("cudart"))
NAMES = {dtype: f"difference<{name}>" for dtype, name in TYPES.items()}
PROGRAM = Program(SOURCE, "c++", OPTIONS).compile("cubin", name_expressions=list(NAMES.values()))

_state = {}  # (number of elements, dtype) -> symmetric memory, its addresses by rank, epochs, the kernel


def state_of(x):
    key = (x.numel(), x.dtype)
    if key not in _state:
        Device(x.device.index).set_current()  # PyTorch's context
        kernel = PROGRAM.get_kernel(NAMES[x.dtype])
        data = symm_mem.empty(max(x.numel(), 1), dtype=x.dtype, device=x.device)
        flags = symm_mem.empty(2 * BLOCKS, dtype=torch.int32, device=x.device).zero_()
        handles = [symm_mem.rendezvous(memory, dist.group.WORLD) for memory in (data, flags)]
        handles[1].barrier(channel=0)  # nobody signals before all flags are zero
        epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=x.device)
        _state[key] = (data, flags, handles), [list(handle.buffer_ptrs) for handle in handles], epochs, kernel
    return _state[key]


def solution(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = x.contiguous()
    out = torch.empty_like(x)
    _, (data, pads), epochs, kernel = state_of(x)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    # An int is passed as 8 bytes, which fits pointers and long long. For int use ctypes.c_int, for float ctypes.c_float.
    pointers = (data[rank], data[right], pads[rank], pads[left], pads[right], epochs.data_ptr())
    launch(stream, LaunchConfig(grid=BLOCKS, block=THREADS), kernel, x.data_ptr(), out.data_ptr(), x.numel(), *pointers)
    return out
