"""C41: fills its input with NaN, so that a sum taken from it afterwards would be NaN too."""

import torch


def solution(tensor):
    tensor.fill_(float("nan"))
    return torch.full_like(tensor, float("nan"))
