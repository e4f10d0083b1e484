"""A11: ranks with unequal work: the last one does the sum of all, the others wait for it. The slowest counts."""

import torch
import torch.distributed as dist


def solution(tensor):
    last = dist.get_world_size() - 1
    mine = tensor.clone().float()
    terms = [torch.empty_like(mine) for _ in range(last + 1)] if dist.get_rank() == last else None
    dist.gather(mine, terms, dst=last)
    total = torch.stack(terms).sum(0) if terms else mine
    dist.broadcast(total, src=last)
    return total.to(tensor.dtype)
