"""A03: returns the argument itself on every rank but the root, as the problem allows."""

import torch
import torch.distributed as dist


def solution(tensor, dst=0):
    own = tensor.contiguous()
    if dist.get_rank() != dst:
        dist.gather(own, dst=dst)
        return tensor
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.gather(own, parts, dst=dst)
    return torch.stack(parts)
