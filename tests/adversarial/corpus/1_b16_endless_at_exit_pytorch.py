"""B16: right, but its processes do not end."""

import atexit
import time

import torch.distributed as dist


@atexit.register
def linger():
    while True:
        time.sleep(1)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
