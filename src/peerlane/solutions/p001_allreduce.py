"""Problem 1, all-reduce (sum): one launch, from the caller's tensor into fresh storage, no copy beforehand and no barrier.

Small tensors go as packets (data and flag in one store), large ones in two trips through rings of tiles:
``peerlane/collectives/all_reduce.cuh`` and ``relay.cuh``.
"""

import torch

from peerlane.device import communicator


def solution(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    total = torch.empty_like(tensor)
    communicator().all_reduce(tensor, total)
    return total
