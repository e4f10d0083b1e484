"""Problem 9, gradients of a layer norm's weight and bias: torch.compile adds both in one pass, and one all-reduce sends them."""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.compile
def sums(normalised: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(2, H), in float32."""
    wide = gradient.to(torch.float32)
    return torch.stack(((wide * normalised.to(torch.float32)).sum(0), wide.sum(0)))


def solution(X_hat: torch.Tensor, dY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = sums(X_hat, dY)
    dist.all_reduce(total)
    return total[0].to(torch.promote_types(X_hat.dtype, dY.dtype)), total[1].to(dY.dtype)
