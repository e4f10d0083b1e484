# expect: wrong_type
"""Returns a tensor subclass, which could compute its contents, or lie about them, when it is compared."""

import torch
import torch.distributed as dist


class Lazy(torch.Tensor):
    pass


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total.as_subclass(Lazy)
