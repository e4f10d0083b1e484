# expect: hang
"""Rank 1 never comes back."""

import torch.distributed as dist


def solution(tensor):
    while dist.get_rank() == 1:
        pass
    return tensor.clone()
