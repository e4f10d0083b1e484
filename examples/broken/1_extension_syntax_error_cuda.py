# expect: build_error, not_run on cpu
"""A CUDA extension, in the public benchmark's manner, that does not compile."""

from utils.cuda_helpers import compile_cuda_extension

SOURCE = r"""
#include <torch/extension.h>
__global__ void add(float* x) { x[threadIdx.x] += ; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {}
"""

extension = compile_cuda_extension("syntax_error", SOURCE)


def solution(tensor):
    return extension.add(tensor)
