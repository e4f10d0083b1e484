"""Problem 66, gradients back to the rows that they came from: parts land in the order of the ids, and are added there.

The reference rolls gradients and ids; here the places of the parts say all. Bound by HBM, which writes and reads the received rows
once, and the links. Sums are float32 additions in memory, in no fixed order. ``peerlane/collectives/exchange.cuh``."""

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.collectives.communicator import relative_parts


def solution(
    grad_output: torch.Tensor,
    seed_inverse_ids: torch.Tensor,
    seed_size: int,
    counts_sent: list[int],
    counts_received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks, sent = group_of(group), grad_output.contiguous()
    received = sent.new_empty((sum(counts_received), *sent.shape[1:]))
    row_bytes = torch.Size(sent.shape[1:]).numel() * sent.itemsize
    parts = (relative_parts(counts, ranks.rank, row_bytes) for counts in (counts_sent, counts_received))
    communicator(ranks).exchange(received, sent, *parts)
    return sent.new_zeros((seed_size, *sent.shape[1:])).index_add_(0, seed_inverse_ids, received)
