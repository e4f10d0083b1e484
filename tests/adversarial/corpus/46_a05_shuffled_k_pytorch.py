"""A05: shuffles the summed axis anew in every call, on every rank by itself."""

import torch
import torch.distributed as dist


def solution(hidden_states, weight_shard, bias_shard):
    order = torch.randperm(hidden_states.shape[1], device=hidden_states.device)
    logits = hidden_states[:, order].float() @ weight_shard[:, order].float().T + bias_shard.float()
    logits = logits.to(hidden_states.dtype)
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return torch.cat(parts, -1)
