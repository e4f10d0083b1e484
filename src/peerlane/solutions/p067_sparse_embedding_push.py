"""Problem 67, pairs of ids and rows pushed to their owners: one question to the device for all sizes, and one launch for each tensor.

Bound by the question, since the results' shapes follow from all ranks' ids, and at large sizes by HBM, which sorts rows by owner, and
the links. ``device/collectives/counts.py`` and ``peerlane/collectives/exchange.cuh``."""

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.collectives.counts import share_counts


def solution(
    idx: torch.Tensor, value: torch.Tensor, num_nodes: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, kit = group_of(group), communicator(group)
    owner, order = torch.sort(idx % ranks.world_size, stable=True)
    places = torch.arange(ranks.world_size + 1, device=idx.device, dtype=owner.dtype)
    table = share_counts(ranks, torch.searchsorted(owner, places).diff())
    sent, received = table[ranks.rank], [of_rank[ranks.rank] for of_rank in table]

    def pushed(rows: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        kit.all_to_all_single(result, rows[order], received, sent)
        return result

    return pushed(idx), pushed(value)
