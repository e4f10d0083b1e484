"""Problem 17, rotary embedding and all-gather: torch.compile rotates queries and keys in one pass each, and one all-gather sends both."""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.compile
def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries and keys, embedded, one behind the other."""
    parts = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        parts.append(x * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2))
    return torch.cat([part.flatten() for part in parts])


def solution(
    q_local: torch.Tensor, k_local: torch.Tensor, cos_local: torch.Tensor, sin_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    own, ranks = rotated(q_local, k_local, cos_local, sin_local), dist.get_world_size()
    gathered = own.new_empty(ranks * own.numel())
    dist.all_gather_into_tensor(gathered, own)
    parts = gathered.view(ranks, -1).split((q_local.numel(), k_local.numel()), 1)
    # (W, B, S, heads, D) to (B, W S, heads, D).
    q, k = (part.unflatten(1, x.shape).transpose(0, 1).flatten(1, 2) for part, x in zip(parts, (q_local, k_local), strict=True))
    return q.contiguous(), k.contiguous()
