"""A17: merges the blocks of keys from the farthest rank to its own, each with its logarithm of a sum."""

import torch
import torch.distributed as dist


def solution(q, k, v, softmax_scale=None, causal=False, group=None):
    rank, world, length = dist.get_rank(group), dist.get_world_size(group), q.shape[1]
    keys, values = ([torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(world)] for part in (k, v))
    dist.all_gather(keys, k.contiguous(), group=group)
    dist.all_gather(values, v.contiguous(), group=group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    queries = q.transpose(1, 2).float()
    visible = range(rank + 1) if causal else range(world)
    answer, log_sum = 0.0, queries.new_full(queries.shape[:-1], -torch.inf)
    for source in sorted(visible, key=lambda peer: -abs(peer - rank)):
        scores = scale * queries @ keys[source].permute(0, 2, 3, 1).float()
        if causal and source == rank:
            scores = scores.masked_fill(scores.new_ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        block = torch.softmax(scores, -1) @ values[source].transpose(1, 2).float()
        block_sum = torch.logsumexp(scores, -1)
        both = torch.logaddexp(log_sum, block_sum)
        answer = answer * (log_sum - both).exp().unsqueeze(-1) + block * (block_sum - both).exp().unsqueeze(-1)
        log_sum = both
    return answer.transpose(1, 2).to(q.dtype)
