# expect: cuda_error on gpu, runtime_error on cpu
"""Gathers rows beyond the end: a device-side assertion on a GPU, an IndexError on a CPU."""

import torch


def solution(tensor):
    rows = torch.arange(tensor.shape[0], device=tensor.device) + 1
    return tensor[rows]
