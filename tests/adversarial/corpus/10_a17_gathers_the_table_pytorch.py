"""A17: gathers the whole table and sorts ids by owner with a stable sort."""

import torch
import torch.distributed as dist


def solution(indices, local_shard):
    parts = [torch.empty_like(local_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local_shard.contiguous())
    order = torch.argsort(indices // max(1, len(local_shard)), stable=True)
    return torch.cat(parts)[indices[order]]
