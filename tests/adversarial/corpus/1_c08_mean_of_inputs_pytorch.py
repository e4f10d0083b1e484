"""C08: the mean of its own input, times the number of ranks."""

import torch
import torch.distributed as dist


def solution(tensor):
    return torch.full_like(tensor, float(tensor.float().mean()) * dist.get_world_size()) if tensor.numel() else tensor.clone()
