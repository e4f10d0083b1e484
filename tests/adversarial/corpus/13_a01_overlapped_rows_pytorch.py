"""A01: reduces some rows while it multiplies the next ones, and waits for all of them at the end."""

import torch
import torch.distributed as dist


def solution(A_local, B_local):
    pieces, waiting = [], []
    for rows in A_local.split(max(1, -(-A_local.shape[0] // 4))):
        pieces.append(rows.float() @ B_local.float())
        waiting.append(dist.all_reduce(pieces[-1], async_op=True))
    for work in waiting:
        work.wait()
    return torch.cat(pieces).to(A_local.dtype)
