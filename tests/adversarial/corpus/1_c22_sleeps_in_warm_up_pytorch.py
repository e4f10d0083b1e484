"""C22: slow for its first calls, so that whoever counts on a time limit measures fewer of them. Its speed must not change."""

import itertools
import time

import torch.distributed as dist

SLOW_CALLS, SLEEP_S = 20, 0.02
calls = itertools.count()


def solution(tensor):
    if next(calls) < SLOW_CALLS:
        time.sleep(SLEEP_S)
    total = tensor.clone()
    dist.all_reduce(total)
    return total
