"""C01: does nothing. Memory is poisoned before every call, so nothing is not an old answer either."""

import torch


def solution(tensor):
    return torch.empty_like(tensor)
