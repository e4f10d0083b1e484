"""B12: the collective fails (bits of floats cannot be combined), and the error is ignored."""

import contextlib

import torch.distributed as dist


def solution(tensor):
    total = tensor.clone()
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(total, op=dist.ReduceOp.BAND)
    return total
