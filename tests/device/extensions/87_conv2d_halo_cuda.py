"""Convolution of a stripe of an image: border rows go to the neighbours' memory, in two buffers by turns, then every rank convolves."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cuda_bf16.h>
#include <pybind11/pybind11.h>
#include <stdexcept>

struct Shape {
    int batch, channels, rows, columns, outputs, kernel_rows, kernel_columns, stride, padding, rank, world;
};

// Block 0 serves the rank above, block 1 the one below. A halo: `padding` rows of all channels from above, then those from below.
template <typename T>
__global__ void send_borders(const T* x, T* const* halos, unsigned* const* pads, Shape s, int offset, unsigned call) {
    const int peer = s.rank + (blockIdx.x ? 1 : -1);
    if (peer < 0 || peer >= s.world) return;
    const int n = s.batch * s.channels * s.padding * s.columns, first = blockIdx.x ? s.rows - s.padding : 0;
    T* to = halos[peer] + offset + (blockIdx.x ? 0 : n);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int column = i % s.columns, row = i / s.columns % s.padding, channel = i / s.columns / s.padding;
        to[i] = x[(channel * s.rows + first + row) * s.columns + column];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        atomicExch_system(pads[peer] + blockIdx.x, call);
    }
}

template <typename T>
__global__ void convolve(const T* x, const T* weight, const T* bias, T* out, const T* halo, unsigned* pad, Shape s, int out_rows,
                         int out_columns, unsigned call) {
    if (threadIdx.x < 2) {
        const bool from_above = threadIdx.x;
        if (from_above ? s.rank > 0 : s.rank + 1 < s.world) while (atomicAdd_system(pad + threadIdx.x, 0u) < call) {}
        __threadfence_system();
    }
    __syncthreads();
    const int n = s.batch * s.channels * s.padding * s.columns, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.batch * s.outputs * out_rows * out_columns) return;
    const int column = i % out_columns, row = i / out_columns % out_rows, output = i / out_columns / out_rows % s.outputs;
    const int image = i / out_columns / out_rows / s.outputs;
    float sum = bias ? static_cast<float>(bias[output]) : 0.0f;
    for (int c = 0; c < s.channels; ++c)
        for (int y = 0; y < s.kernel_rows; ++y)
            for (int z = 0; z < s.kernel_columns; ++z) {
                const int at = row * s.stride + y - s.padding, beside = column * s.stride + z - s.padding;
                if (beside < 0 || beside >= s.columns) continue;
                const int plane = image * s.channels + c;
                T value;
                if (at < 0) {
                    if (s.rank == 0) continue;
                    value = halo[(plane * s.padding + at + s.padding) * s.columns + beside];
                } else if (at >= s.rows) {
                    if (s.rank + 1 == s.world) continue;
                    value = halo[n + (plane * s.padding + at - s.rows) * s.columns + beside];
                } else {
                    value = x[(plane * s.rows + at) * s.columns + beside];
                }
                sum += static_cast<float>(value) * static_cast<float>(
                    weight[((output * s.channels + c) * s.kernel_rows + y) * s.kernel_columns + z]);
            }
    out[i] = static_cast<T>(sum);
}

template <typename T>
void conv2d(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, const Shape& s, int out_rows, int out_columns,
            uintptr_t halos, uintptr_t own_halo, uintptr_t pads, uintptr_t own_pad, unsigned call) {
    const int offset = call % 2 * 2 * s.batch * s.channels * s.padding * s.columns;
    send_borders<<<2, 64>>>((const T*)x, (T* const*)halos, (unsigned* const*)pads, s, offset, call);
    const int n = s.batch * s.outputs * out_rows * out_columns;
    convolve<<<(n + 127) / 128, 128>>>((const T*)x, (const T*)weight, (const T*)bias, (T*)out, (const T*)own_halo + offset,
                                       (unsigned*)own_pad, s, out_rows, out_columns, call);
    if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("a launch failed");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    pybind11::class_<Shape>(m, "Shape").def(pybind11::init([](pybind11::args sizes) {
        Shape s;
        for (int i = 0; i < 11; ++i) reinterpret_cast<int*>(&s)[i] = sizes[i].cast<int>();
        return s;
    }));
    m.def("conv2d_bf16", &conv2d<__nv_bfloat16>, "bfloat16");
    m.def("conv2d_fp32", &conv2d<float>, "float32");
}
"""

state = {}


def module():
    if "module" not in state:
        state["module"] = load_inline(
            name="conv2d_halo",
            cpp_sources=[""],
            cuda_sources=[SOURCE],
            extra_cuda_cflags=["-O3", "-lineinfo", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"],
            no_implicit_headers=True,
        )
    return state["module"]


def solution(x, weight, bias, stride=1, padding=1, group=None):
    group = group or dist.group.WORLD
    x, weight = x.contiguous(), weight.contiguous()
    batch, channels, rows, columns = x.shape
    outputs, _, *kernel = weight.shape
    key = (group, x.shape, padding, x.dtype)
    if key not in state:
        memory = symm_mem.empty(max(1, 4 * batch * channels * padding * columns), dtype=x.dtype, device=x.device)
        state[key] = [memory, symm_mem.rendezvous(memory, group), 0]
    memory, handle, _ = state[key]
    state[key][2] += 1
    out_rows, out_columns = (
        (size + 2 * padding - of_kernel) // stride + 1 for size, of_kernel in zip((rows, columns), kernel, strict=True)
    )
    out = x.new_empty(batch, outputs, out_rows, out_columns)
    shape = module().Shape(batch, channels, rows, columns, outputs, *kernel, stride, padding, handle.rank, handle.world_size)
    pointers = handle.buffer_ptrs_dev, memory.data_ptr(), handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs[handle.rank]
    conv2d = module().conv2d_bf16 if x.dtype == torch.bfloat16 else module().conv2d_fp32
    tensors = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.contiguous().data_ptr(), out.data_ptr())
    conv2d(*tensors, shape, out_rows, out_columns, *pointers, state[key][2])
    return out
