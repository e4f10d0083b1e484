"""Problem 34, all-gather along the first axis: one launch, packets for small tensors and rings of tiles for large ones.

Bound by the links: W - 1 copies leave every rank. ``peerlane/collectives/exchange_packets.cuh`` and ``exchange.cuh``."""

import torch
import torch.distributed as dist

from peerlane.device import communicator


def solution(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return communicator(group).all_gather(x).flatten(0, 1)
