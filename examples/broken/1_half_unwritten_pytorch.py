# expect: wrong_result
"""Writes half of the rows. The rest is what was in memory: here the evaluator has put NaN, so old answers do not shine through."""

import torch
import torch.distributed as dist


def solution(tensor):
    half = tensor[: tensor.shape[0] // 2].clone()
    dist.all_reduce(half)
    out = torch.empty_like(tensor)
    out[: half.shape[0]] = half
    return out
