"""B11: rank 2 reads an address that is not mapped, on the host, which ends its process."""

import ctypes

import torch.distributed as dist

NOT_MAPPED = 16


def solution(tensor):
    if dist.get_rank() == 2:
        ctypes.string_at(NOT_MAPPED, 8)
    total = tensor.clone()
    dist.all_reduce(total)
    return total
