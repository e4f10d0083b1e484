# expect: wrong_type
"""Right values in float64, whatever the input's dtype is."""

import torch
import torch.distributed as dist


def solution(tensor):
    total = tensor.to(torch.float64)
    dist.all_reduce(total)
    return total
