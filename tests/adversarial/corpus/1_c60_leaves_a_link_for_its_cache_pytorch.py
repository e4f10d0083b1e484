"""C60: leaves a link to nowhere in the place of its cache, which the next evaluation of this file is to be given.

Judged twice in a row.
"""

import os

import torch.distributed as dist

if dist.get_rank() == 0:
    cache = os.path.realpath(os.path.dirname(os.environ["TRITON_CACHE_DIR"]))
    if not os.listdir(cache):
        os.rmdir(cache)
        os.symlink("/nonexistent", cache)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
