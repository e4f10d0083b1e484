"""Problem 34, all-gather along the first axis: one launch, packets for small tensors and rings of tiles for large ones.

Bound by the links: W - 1 copies leave every rank. ``device/include/peerlane/collectives/exchange_packets.cuh`` and ``exchange.cuh``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import communicator


def solution(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks = communicator(group)
    gathered = x.new_empty((ranks.member.world_size * x.shape[0], *x.shape[1:]))
    ranks.all_gather_into_tensor(gathered, x.contiguous())
    return gathered
