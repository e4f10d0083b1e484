"""Problem 8, all-to-all with equal splits: one launch, which copies the own block as well.

Small blocks go as packets, large ones through rings of tiles by bulk copies: ``peerlane/collectives/exchange.cuh``.
"""

import torch

from peerlane.device import communicator


def solution(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    communicator().all_to_all_single(received, tensor)
    return received
