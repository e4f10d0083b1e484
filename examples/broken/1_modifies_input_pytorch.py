# expect: wrong_result
"""The right sum, left in the caller's tensor as well, which the problem does not allow."""

import torch.distributed as dist


def solution(tensor):
    dist.all_reduce(tensor)
    return tensor.clone()
