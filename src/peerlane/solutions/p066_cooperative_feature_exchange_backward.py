"""Problem 66, gradients back to the rows that they came from: one kernel adds those that stay, while others travel.

The reference rolls gradients and ids; here ranks tell each other where parts begin. Bound by HBM, the additions in the L2, and the links.
Sums are float32 additions in memory, four at a time, in no fixed order. ``families/row_parts.py``."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.solutions.families.row_parts import add_rows, parts


def solution(
    grad_output: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    seed_size: int,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks = group_of(group)
    return add_rows(
        ranks, grad_output, seed_inverse_ids, seed_size, *(parts(counts, ranks.rank) for counts in (counts_sent, counts_received))
    )
