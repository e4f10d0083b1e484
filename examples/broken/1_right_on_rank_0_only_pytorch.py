# expect: wrong_result
"""A reduce where an all-reduce is asked for: the sum arrives on rank 0, the others return their own part."""

import torch.distributed as dist


def solution(tensor):
    total = tensor.clone()
    dist.reduce(total, dst=0)
    return total if dist.get_rank() == 0 else tensor.clone()
