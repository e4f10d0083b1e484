"""Problem 66, gradients back to the rows that they came from: one kernel adds those that stay, while others travel.

The reference rolls gradients and ids; here ranks tell each other where parts begin. Bound by HBM, the additions in the L2, and the links.
Sums are float32 additions in memory, four at a time, in no fixed order. ``families/relative_rows.py``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.relative_rows import add_rows


def solution(
    grad_output: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    seed_size: int,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    return add_rows(group_of(group), grad_output, seed_inverse_ids, seed_size, counts_sent, counts_received)
