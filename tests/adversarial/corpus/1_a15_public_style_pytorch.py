"""A15: a file as the public benchmark takes it. Its extension is compiled when a GPU tensor first needs it, so it runs on CPU ranks too."""

import torch
import torch.distributed as dist
from utils.cuda_helpers import compile_cuda_extension

SOURCE = r"""
#include <torch/extension.h>
torch::Tensor duplicate(torch::Tensor from) { return from.clone(); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("duplicate", &duplicate); }
"""

extension = None


def clone(tensor: torch.Tensor) -> torch.Tensor:
    global extension
    if not tensor.is_cuda:
        return tensor.clone()
    if extension is None:
        extension = compile_cuda_extension("public_style_lazy_duplicate", SOURCE)
    return extension.duplicate(tensor)


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    total = clone(tensor)
    dist.all_reduce(total)
    return total
