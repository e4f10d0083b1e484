"""A17: W broadcasts, straight into the rows of the answer."""

import torch
import torch.distributed as dist


def solution(tensor):
    gathered = torch.empty((dist.get_world_size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    gathered[dist.get_rank()] = tensor
    if tensor.numel():
        for work in [dist.broadcast(row, source, async_op=True) for source, row in enumerate(gathered)]:
            work.wait()
    return gathered
