"""Problem 3, broadcast from one root: one launch.

Large tensors leave the root once, cut into a share for every other rank, which passes its share on to the others: the root's port, which
would be busy W - 1 times as long otherwise, is the bound either way. ``peerlane/collectives/relay.cuh``.
"""

import torch

from peerlane.device import communicator


def solution(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    communicator().broadcast(tensor, src, received)
    return received
