"""Problem 35, all-gather of unlike lengths: one launch tells the lengths, one moves the tensors to their places.

Bound by one question to the device, as the result's shape follows from what others have, and at large sizes by the links. Another axis
than the first is moved to the front and back. ``device/collectives/counts.py`` and ``peerlane/collectives/exchange.cuh``."""

from itertools import accumulate

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.collectives.counts import share_counts


def solution(x: torch.Tensor, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, rows = group_of(group), x.movedim(gather_dim, 0).contiguous()
    lengths = [length for (length,) in share_counts(ranks, [rows.shape[0]])]
    gathered = rows.new_empty((sum(lengths), *rows.shape[1:]))
    row_bytes = torch.Size(rows.shape[1:]).numel() * rows.itemsize
    sizes = [length * row_bytes for length in lengths]
    begins = list(accumulate(sizes, initial=0))
    if sum(sizes):
        communicator(ranks).exchange(gathered, rows, [(0, rows.nbytes)] * ranks.world_size, list(zip(begins, sizes, strict=False)))
    return gathered.movedim(0, gather_dim).contiguous()
