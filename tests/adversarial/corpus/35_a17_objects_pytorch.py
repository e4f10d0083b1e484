"""A17: gathers tensors as pickled objects, whatever their lengths."""

import torch
import torch.distributed as dist


def solution(x, gather_dim, group=None):
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x.cpu().contiguous(), group=group)
    return torch.cat(parts, dim=gather_dim).to(x.device)
