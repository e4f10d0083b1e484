"""B16: an endless loop in the call, on rank 1."""

import torch.distributed as dist


def solution(tensor):
    while dist.get_rank() == 1:
        pass
    total = tensor.clone()
    dist.all_reduce(total)
    return total
