"""Problem 43, a step of Adam on shards and all-gather: torch.compile makes one pass of the step."""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.compile
def stepped(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, beta1: float, beta2: float, rate: float, scale: float, eps: float
) -> torch.Tensor:
    """w after the step; ``rate`` and ``scale`` hold the corrections of both moments."""
    g, m, v = (x.to(torch.float32) for x in (g, m, v))
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    return (w.to(torch.float32) - rate * m / ((v * scale).sqrt() + eps)).to(w.dtype)


def solution(
    grad_shard: torch.Tensor,
    master_shard: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> torch.Tensor:
    rate, scale = lr / (1.0 - beta1**step), 1.0 / (1.0 - beta2**step)
    updated = stepped(master_shard, grad_shard, exp_avg, exp_avg_sq, beta1, beta2, rate, scale, eps)
    gathered = updated.new_empty(dist.get_world_size() * updated.numel())
    dist.all_gather_into_tensor(gathered, updated)
    return gathered
