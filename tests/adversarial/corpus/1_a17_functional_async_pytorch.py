"""A17: returns what a functional collective returned, which waits when somebody reads it."""

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives


def solution(tensor):
    return collectives.all_reduce(tensor, "sum", dist.group.WORLD)
