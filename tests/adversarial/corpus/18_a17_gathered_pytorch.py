"""A17: gathers the whole rows, and normalises its own columns of them."""

import torch
import torch.distributed as dist


def solution(local_hidden_states, local_weight, variance_epsilon):
    parts = [torch.empty_like(local_hidden_states, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local_hidden_states.contiguous())
    rows = torch.cat(parts, dim=-1).float()
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + variance_epsilon)
    return (local_hidden_states.float() * scale).to(local_hidden_states.dtype) * local_weight
