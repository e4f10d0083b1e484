"""Problem 33, the all-to-all from one axis to another: one kernel stores every run where it belongs in the receiver's result.

Bound by the links: (W - 1) / W of the tensor leaves every rank, and is written once. ``peerlane/collectives/strided.cuh``.

The next call overwrites the results, which lie in the arena."""

import torch
import torch.distributed as dist

from peerlane.device import group_of
from peerlane.device.collectives.strided import exchange_axes


def solution(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, scatter, gather = group_of(group), scatter_dim % x.dim(), gather_dim % x.dim()
    if scatter != gather:
        return exchange_axes(ranks, x, joined=gather, cut=scatter)
    # Of one axis the pieces are an axis of their own, which is cut.
    pieces = x.reshape(*x.shape[:scatter], ranks.world_size, x.shape[scatter] // ranks.world_size, *x.shape[scatter + 1 :])
    return exchange_axes(ranks, pieces, joined=scatter + 1, cut=scatter).reshape(x.shape)
