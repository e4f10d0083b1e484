"""Problem 4, reduce to one rank: the terms are gathered there, added in fp32 and rounded once; the others keep what they had."""

from __future__ import annotations

import torch
import torch.distributed as dist


def solution(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    if dist.get_rank() != dst:
        dist.gather(tensor, dst=dst)
        return tensor.clone()
    terms = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, terms, dst=dst)
    return torch.stack(terms).sum(0, dtype=torch.float32).to(tensor.dtype)
