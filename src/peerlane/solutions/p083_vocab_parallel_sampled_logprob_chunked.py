"""Problem 83, problem 82 in chunks: the same kernel, which has no intermediate results for chunks to bound.

Bound by HBM, which reads each logit once. ``families/nucleus.py``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.nucleus import filtered_logits


def solution(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float | None = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:
    return filtered_logits(group_of(tp_group), vocab_parallel_logits, target, (top_k, top_p))
