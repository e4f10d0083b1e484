"""C42: the right sum in another dtype, which leaves the rounding to the caller."""

import torch.distributed as dist


def solution(tensor):
    total = tensor.double()
    dist.all_reduce(total)
    return total
