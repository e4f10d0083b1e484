"""An extension with Python's headers alone, which compiles in seconds: statics, a table of peers and device variables of a rank."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <Python.h>
#include <cuda_runtime.h>

static int calls = 0;
static unsigned long long peers[8];  // found in the first call
__device__ int launches = 40;

__global__ void add_first_of_peers(unsigned long long* table, float* out, int world) {
    launches += 1;
    for (int r = 0; r < world; ++r) *out += *reinterpret_cast<const float*>(table[r]);
}

static PyObject* sum_of_firsts(PyObject*, PyObject* args) {
    unsigned long long out;
    int world;
    PyObject* found;
    if (!PyArg_ParseTuple(args, "KiO", &out, &world, &found)) return nullptr;
    if (calls++ == 0)
        for (int r = 0; r < world; ++r) peers[r] = PyLong_AsUnsignedLongLong(PyList_GetItem(found, r));
    unsigned long long* table;
    cudaMalloc(&table, sizeof peers);
    cudaMemcpyAsync(table, peers, sizeof peers, cudaMemcpyHostToDevice, 0);
    add_first_of_peers<<<1, 1>>>(table, reinterpret_cast<float*>(out), world);
    int seen = 0;
    cudaMemcpyFromSymbol(&seen, launches, sizeof seen);
    cudaFree(table);
    return Py_BuildValue("ii", calls, seen);
}

static PyObject* shared_bytes(PyObject*, PyObject* args) {  // what launches that ask for so many say
    int bytes;
    if (!PyArg_ParseTuple(args, "i", &bytes)) return nullptr;
    add_first_of_peers<<<1, 1, bytes>>>(nullptr, nullptr, 0);
    const char* first = cudaGetErrorName(cudaGetLastError());
    cudaFuncSetAttribute(add_first_of_peers, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    add_first_of_peers<<<1, 1, bytes>>>(nullptr, nullptr, 0);
    return Py_BuildValue("ss", first, cudaGetErrorName(cudaGetLastError()));
}

static PyObject* elapsed(PyObject*, PyObject*) try {
    float ms = 0;
    cudaEventElapsedTime(&ms, nullptr, nullptr);
    return PyFloat_FromDouble(ms);
} catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
}

static PyMethodDef functions[] = {
    {"sum_of_firsts", sum_of_firsts, METH_VARARGS, ""},
    {"shared_bytes", shared_bytes, METH_VARARGS, ""},
    {"elapsed", elapsed, METH_NOARGS, ""},
    {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "light", "", -1, functions};
PyMODINIT_FUNC PyInit_light() { return PyModule_Create(&definition); }
"""

extension = load_inline("light", "", SOURCE, no_implicit_headers=True)


handles = []


def solution(x, what):
    if what != "sum":
        return getattr(extension, what[0])(*what[1:])
    if not handles:
        memory = symm_mem.empty(1)
        memory.copy_(x)
        handles.append(symm_mem.rendezvous(memory, dist.group.WORLD))
        handles[0].barrier()
    total = torch.zeros(1)
    return total, extension.sum_of_firsts(total.data_ptr(), dist.get_world_size(), list(handles[0].buffer_ptrs))
