"""Problem 4, reduce (sum) to one root: one launch.

The other ranks each sum a share and send the sum to the root, whose port takes in the tensor once instead of W - 1 times:
``peerlane/collectives/relay.cuh``. They return a copy of their own tensor, as the problem wants it, which
the same launch makes.
"""

import torch

from peerlane.device import communicator


def solution(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    tensor = tensor.contiguous()
    total = torch.empty_like(tensor)
    communicator().reduce(tensor, dst, total)
    return total
