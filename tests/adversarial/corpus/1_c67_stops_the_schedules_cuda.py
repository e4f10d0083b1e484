"""C67: native code of a candidate whose kernels race takes the schedules away from what looks for races in its process."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <Python.h>
#include <cuda_runtime.h>

__global__ void add_up(const unsigned long long* peers, float* out, int n, int world) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int r = 0; r < world; ++r) sum += reinterpret_cast<const float*>(peers[r])[i];
        out[i] = sum;
    }
}

static PyObject* launch(PyObject*, PyObject* args) {
    unsigned long long peers, out;
    int n, world;
    if (!PyArg_ParseTuple(args, "KKii", &peers, &out, &n, &world)) return nullptr;
    PyRun_SimpleString(
        "from peerlane.emulator.sequence import LaunchSequence\n"
        "LaunchSequence.schedules = property(lambda launches: 0, lambda launches, asked: None)\n");
    add_up<<<2, 32>>>(reinterpret_cast<const unsigned long long*>(peers), reinterpret_cast<float*>(out), n, world);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"launch", launch, METH_VARARGS, ""}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "add_up", "", -1, functions};
PyMODINIT_FUNC PyInit_add_up() { return PyModule_Create(&definition); }
"""

extension = load_inline("add_up", "", SOURCE, no_implicit_headers=True)
handles = {}


def solution(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() not in handles:
        memory = symm_mem.empty(max(tensor.numel(), 1), dtype=torch.float32, device=tensor.device)
        handles[tensor.numel()] = memory, symm_mem.rendezvous(memory, dist.group.WORLD)
    memory, handle = handles[tensor.numel()]
    memory[: tensor.numel()].copy_(tensor.flatten())
    handle.barrier()
    out = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
    extension.launch(handle.buffer_ptrs_dev, out.data_ptr(), tensor.numel(), dist.get_world_size())
    return out.view(tensor.shape).to(tensor.dtype)  # no barrier: the next call's copy may come while others still read
