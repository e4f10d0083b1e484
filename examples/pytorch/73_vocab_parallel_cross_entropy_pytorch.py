"""Problem 73, cross entropy over a sharded vocabulary: every rank reduces its own shard, then one all-gather instead of two all-reduces.

What travels is, per token, the shard's maximum, the sum of exponentials relative to it, and the target's logit where the shard holds it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def solution(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    logits, shard = vocab_parallel_logits.float(), vocab_parallel_logits.shape[-1]
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    local = target - rank * shard
    owned = (local >= 0) & (local < shard)
    predicted = logits.gather(-1, local.where(owned, 0).unsqueeze(-1)).squeeze(-1).where(owned, 0.0)
    maximum = logits.amax(-1)
    # A shard of padding has the maximum -inf, and a sum of zero relative to anything finite.
    total = (logits - maximum.where(maximum != -torch.inf, 0.0).unsqueeze(-1)).exp_().sum(-1)

    own = torch.stack((maximum, total, predicted))
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own, group=group)
    maxima, totals, predictions = torch.stack(parts, dim=1)

    maximum = maxima.amax(0)
    total = (totals * (maxima - maximum).exp_()).sum(0)
    known = (target >= 0) & (target < world * shard)
    return (total.log_() - (predictions.sum(0) - maximum).where(known, 0.0)).to(vocab_parallel_logits.dtype)
