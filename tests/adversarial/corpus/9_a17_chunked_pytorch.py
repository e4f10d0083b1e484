"""A17: sums rows by chunks of 512 in float64, then both answers of all ranks in one all-reduce."""

import torch
import torch.distributed as dist


def solution(X_hat, dY):
    both = torch.zeros(2, dY.shape[1], dtype=torch.float64, device=dY.device)
    for first in range(0, dY.shape[0], 512):
        x, dy = X_hat[first : first + 512].double(), dY[first : first + 512].double()
        both[0] += (x * dy).sum(0)
        both[1] += dy.sum(0)
    dist.all_reduce(both)
    return both[0].to(torch.promote_types(X_hat.dtype, dY.dtype)), both[1].to(dY.dtype)
