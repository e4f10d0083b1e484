"""Problem 16, matrix product and reduce-scatter: partial products are exchanged by an all-to-all, added in fp32 and rounded once."""

from __future__ import annotations

import torch
import torch.distributed as dist


def solution(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    product = A_local @ B_local
    terms = torch.empty_like(product)
    dist.all_to_all_single(terms, product)
    return terms.unflatten(0, (dist.get_world_size(), -1)).sum(0, dtype=torch.float32).to(product.dtype)
