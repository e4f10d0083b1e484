# expect: wrong_result
"""NaN everywhere, which a comparison by `error > tolerance` would let through."""

import torch


def solution(tensor):
    return torch.full_like(tensor, float("nan"))
