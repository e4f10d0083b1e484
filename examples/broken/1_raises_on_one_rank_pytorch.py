# expect: runtime_error
"""Rank 1 raises while the others wait for it in a collective: the verdict must be rank 1's error, not their hang."""

import torch.distributed as dist


def solution(tensor):
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    total = tensor.clone()
    dist.all_reduce(total)
    return total
