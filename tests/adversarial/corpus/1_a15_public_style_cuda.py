"""A15: a file as the public benchmark takes it, with a CUDA extension of its own; without a CUDA build of torch it cannot be compiled."""

import torch
import torch.distributed as dist
from utils.cuda_helpers import compile_cuda_extension

SOURCE = r"""
#include <torch/extension.h>
__global__ void copy(const float* from, float* to, int n) { for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i]; }
torch::Tensor duplicate(torch::Tensor from) {
    auto to = torch::empty_like(from);
    copy<<<1, 256>>>(from.data_ptr<float>(), to.data_ptr<float>(), from.numel());
    return to;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("duplicate", &duplicate); }
"""

extension = compile_cuda_extension("public_style_duplicate", SOURCE)


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    total = extension.duplicate(tensor.float())
    dist.all_reduce(total)
    return total.to(tensor.dtype)
