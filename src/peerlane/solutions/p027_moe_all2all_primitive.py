"""Problem 27, variable-split all-to-all of token rows: one launch of the kit's exchange, whose parts have any length."""

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of


def solution(
    local_tensor: torch.Tensor,
    input_split_sizes: list[int] | torch.Tensor | None = None,
    output_split_sizes: list[int] | torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rows = local_tensor.contiguous()
    if group_of(group).world_size == 1:
        return rows
    sent, received = (sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes for sizes in (input_split_sizes, output_split_sizes))
    result = rows.new_empty((rows.shape[0] if received is None else sum(received), *rows.shape[1:]))
    communicator(group).all_to_all_single(result, rows, received, sent)
    return result
