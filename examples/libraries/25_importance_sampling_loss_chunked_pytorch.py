"""Problem 25, policy-gradient loss from a language-model head: valid tokens alone, in chunks, with torch.compile of the cross entropy.

The number of valid tokens has to reach the host, so that a CUDA graph cannot hold it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

CHUNK = 1024
"""tokens whose logits exist at a time"""


@torch.compile(dynamic=True)
def log_probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The labels' log-probabilities, in float32."""
    return -F.cross_entropy(logits.to(torch.float32), labels, reduction="none")


@torch.compile(dynamic=True)
def terms(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The policy gradient of every token; five sums over the valid ones; the least ratio, negated, and the largest."""
    log_ratio = torch.where(valid, logprobs - old, 0.0).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    gradient = torch.where(valid, -ratio * advantages, 0.0)
    each = (gradient, ratio, ratio - log_ratio - 1.0, -logprobs, torch.ones_like(ratio))
    sums = torch.stack([torch.where(valid, term, 0.0).sum() for term in each])
    return gradient, sums, torch.stack([torch.where(valid, sign * ratio, -math.inf).max() for sign in (-1.0, 1.0)])


def solution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    flat, valid = labels.flatten(), labels != ignore_index
    logprobs = torch.zeros(flat.shape, dtype=torch.float32, device=flat.device)
    for part in valid.flatten().nonzero().squeeze(-1).split(CHUNK):
        if part.numel():
            logprobs[part] = log_probability(hidden_states.flatten(0, -2)[part] @ weight.t(), flat[part])
    logprobs = logprobs.view(labels.shape)
    gradient, sums, extremes = terms(logprobs, old_logprobs, advantages, valid)
    dist.all_reduce(sums)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    loss, mean, kl, entropy = (sums[:4] / sums[4].clamp(min=1.0)).unbind()
    wide = torch.promote_types(hidden_states.dtype, torch.promote_types(old_logprobs.dtype, advantages.dtype))
    metrics = torch.stack([mean, -extremes[0], extremes[1], kl, entropy])
    return loss, None, logprobs.to(hidden_states.dtype), gradient.to(wide), metrics
