"""Problem 82, log-probabilities under top-k and top-p with a sharded vocabulary: one kernel, in which no logit crosses a link.

With up to 93 of top-k each rank sends its k largest logits of a token, and every rank merges them; for other filters ranks count logits in
bins, and send sums over bins. Bound by HBM: each rank reads its shard once, where the reference sends it, sorts it and sends results back.
Small inputs are bound by the launch and the trips of packets. ``families/nucleus.py``, and docs/kernels.md."""

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
) -> torch.Tensor:
    return filtered_logits(group_of(tp_group), vocab_parallel_logits, target, (top_k, top_p))
