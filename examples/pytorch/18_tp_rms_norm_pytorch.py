"""Problem 18, RMSNorm over a sharded hidden dimension: the sums of squares come from one fused pass that makes no fp32 copy."""

from __future__ import annotations

import torch
import torch.distributed as dist


def solution(local_hidden_states: torch.Tensor, local_weight: torch.Tensor, variance_epsilon: float) -> torch.Tensor:
    square_sum = torch.linalg.vector_norm(local_hidden_states, dim=-1, keepdim=True, dtype=torch.float32).square_()
    dist.all_reduce(square_sum)
    mean_square = square_sum / (local_hidden_states.shape[-1] * dist.get_world_size())
    normalised = local_hidden_states * torch.rsqrt(mean_square + variance_epsilon)
    return normalised.to(local_hidden_states.dtype) * local_weight
