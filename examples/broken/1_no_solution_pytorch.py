# expect: import_error
"""Can be imported, but has no function of the name `solution`."""

import torch.distributed as dist


def solve(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
