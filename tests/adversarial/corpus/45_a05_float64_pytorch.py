"""A05: sums and normalises in float64, which no one asked for."""

import torch.distributed as dist


def solution(rs_input_1d, gamma, eps):
    world, wide = dist.get_world_size(), rs_input_1d.double()
    dist.all_reduce(wide)
    rows = (wide.chunk(world)[dist.get_rank()] / world).view(-1, gamma.numel())
    return (rows / (rows.pow(2).mean(1, keepdim=True) + eps).sqrt() * gamma.double()).to(rs_input_1d.dtype)
