"""C03: leaves out one rank's contribution, another one in every call."""

import itertools

import torch.distributed as dist

calls = itertools.count()


def solution(tensor):
    total = tensor.clone()
    if dist.get_rank() == next(calls) % dist.get_world_size():
        total.zero_()
    dist.all_reduce(total)
    return total
