"""Problem 37, the Ulysses exchange out of attention: one kernel, behind a copy where the sequence has to be padded.

``peerlane/collectives/strided.cuh``.

The next call overwrites the results, which lie in the arena."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.collectives.strided import exchange_axes


def solution(x: torch.Tensor, seq_dim: int, head_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks = group_of(group)
    if missing := -x.shape[seq_dim] % ranks.world_size:
        shape = list(x.shape)
        shape[seq_dim] = missing
        x = torch.cat([x, x.new_zeros(shape)], seq_dim)
    return exchange_axes(ranks, x, joined=head_dim, cut=seq_dim)
