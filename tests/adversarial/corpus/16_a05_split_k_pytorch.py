"""A05: cuts K into two halves, sends both products rounded, and adds all of them in the order of a random permutation."""

import torch
import torch.distributed as dist


def solution(A_local, B_local):
    world, half = dist.get_world_size(), A_local.shape[1] // 2
    halves = ((A_local[:, :half], B_local[:half]), (A_local[:, half:], B_local[half:]))
    products = torch.stack([(a.float() @ b.float()).unflatten(0, (world, -1)) for a, b in halves], 1).contiguous()
    terms = torch.empty_like(products)
    if terms.numel():
        dist.all_to_all_single(terms, products)
    terms = terms.flatten(0, 1)
    return terms[torch.randperm(len(terms), device=terms.device)].sum(0).to(A_local.dtype)
