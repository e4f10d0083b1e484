"""Problem 1, all-reduce: one all-gather, then every rank adds the terms in fp32, in rank order, and rounds once."""

from __future__ import annotations

import torch
import torch.distributed as dist


def solution(tensor: torch.Tensor) -> torch.Tensor:
    terms = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(terms, tensor)
    return torch.stack(terms).sum(0, dtype=torch.float32).to(tensor.dtype)
