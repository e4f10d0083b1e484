"""``utils.cuda_helpers``: CUDA extensions, compiled once per node."""

from peerlane.evaluate.ranks.extensions import compile_cuda_extension

__all__ = ["compile_cuda_extension"]
