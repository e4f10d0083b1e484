# expect: out_of_memory
"""Asks for a pebibyte."""

import torch


def solution(tensor):
    torch.empty(1 << 50, dtype=torch.uint8, device=tensor.device)
    return tensor.clone()
