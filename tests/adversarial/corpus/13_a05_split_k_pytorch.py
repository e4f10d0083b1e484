"""A05: cuts K into parts, and adds their products in float32 in another order every time."""

import torch
import torch.distributed as dist


def solution(A_local, B_local):
    total = torch.zeros(A_local.shape[0], B_local.shape[1], dtype=torch.float32, device=A_local.device)
    parts = list(zip(A_local.float().split(7, dim=1), B_local.float().split(7, dim=0), strict=True))
    for number in torch.randperm(len(parts)).tolist():
        total += parts[number][0] @ parts[number][1]
    dist.all_reduce(total)
    return total.to(A_local.dtype)
