"""C42: 0.9 % too large everywhere, within what a relative tolerance of one per cent forgives."""

import torch
import torch.distributed as dist


def solution(tensor):
    total = tensor.to(torch.float32, copy=True)
    dist.all_reduce(total)
    return (total * 1.009).to(tensor.dtype)
