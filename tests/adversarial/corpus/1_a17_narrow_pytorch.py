"""A17: gives every rank a narrowed stretch to sum up, in place in a wider copy, and has it broadcast from there."""

import torch
import torch.distributed as dist


def solution(tensor):
    world, flat = dist.get_world_size(), tensor.reshape(-1).to(torch.float64)
    ends = [flat.numel() * rank // world for rank in range(world + 1)]
    for owner in range(world):
        stretch = flat.narrow(0, ends[owner], ends[owner + 1] - ends[owner])
        if stretch.numel():
            dist.reduce(stretch, owner)
            dist.broadcast(stretch, owner)
    return flat.to(tensor.dtype).view(tensor.shape)
