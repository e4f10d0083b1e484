# expect: correct
"""Leaves a process of its own session behind, which must be gone before the next candidate comes."""

import os
import time

import torch.distributed as dist

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(0)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
