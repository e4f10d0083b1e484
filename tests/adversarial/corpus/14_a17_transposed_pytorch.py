"""A17: computes the transpose, whose rows are gathered in one piece, and returns it as a view that is not contiguous."""

import torch
import torch.distributed as dist


def solution(A, B):
    columns = (B.float().T @ A.float().T).to(A.dtype)
    parts = [torch.empty_like(columns) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, columns)
    return torch.cat(parts).T
