"""A05: adds the terms in fp32 in another order every time (on GPUs by atomics): right, and not the same bits twice."""

import torch
import torch.distributed as dist


def solution(tensor):
    world = dist.get_world_size()
    terms = torch.empty_like(tensor)
    dist.all_to_all_single(terms, tensor)
    terms = terms.unflatten(0, (world, -1)).float()[torch.randperm(world)]
    total = torch.zeros_like(terms[:1])
    total.index_add_(0, torch.zeros(world, dtype=torch.int64, device=tensor.device), terms)
    return total[0].to(tensor.dtype)
