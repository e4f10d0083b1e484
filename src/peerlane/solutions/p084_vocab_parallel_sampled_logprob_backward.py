"""Problem 84, the gradient of problem 83: the same kernel, which finds the filter again and writes its shard's part of the gradient.

Bound by HBM: logits are read twice, the second time from L2 where they fit, and float32 gradients are written once. Neither crosses a
link. Logits that equal the top-p cut are all kept, with the mass of as many as the cut takes. ``families/nucleus.py``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.nucleus import filtered_logits


def solution(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    grad_output: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float | None = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:
    return filtered_logits(group_of(tp_group), vocab_parallel_logits, target, (top_k, top_p), grad_output)
