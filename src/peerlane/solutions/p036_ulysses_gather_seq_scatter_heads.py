"""Problem 36, the Ulysses exchange into attention: one kernel stores every run where it belongs in the receiver's result.

The results lie in the arena, so nothing is copied twice. Padding is not sent. ``peerlane/collectives/strided.cuh``.

The next call overwrites the results, which lie in the arena."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.collectives.strided import exchange_axes


def solution(
    x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None, unpadded_dim_size: int = 0
) -> torch.Tensor:
    ranks = group_of(group)
    kept = unpadded_dim_size if unpadded_dim_size % ranks.world_size else None
    return exchange_axes(ranks, x, joined=seq_dim, cut=head_dim, kept=kept)
