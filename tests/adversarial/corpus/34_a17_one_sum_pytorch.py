"""A17: gathers by a sum of bytes that are zero in everybody else's place."""

import torch
import torch.distributed as dist


def solution(x, group=None):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = x.contiguous().view(-1).view(torch.uint8)
    gathered = own.new_zeros(world, own.numel())
    gathered[rank] = own
    if own.numel():
        dist.all_reduce(gathered, group=group)
    return gathered.view(-1).view(x.dtype).view(world * x.shape[0], *x.shape[1:])
