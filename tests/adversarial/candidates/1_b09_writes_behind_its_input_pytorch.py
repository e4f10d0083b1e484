# expect: wrong_result
"""B09: off by one: writes the element behind the last one of its input, where nothing belongs to it."""

import torch.distributed as dist


def solution(tensor):
    behind = tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel())
    behind.zero_()
    total = tensor.clone()
    dist.all_reduce(total)
    return total
