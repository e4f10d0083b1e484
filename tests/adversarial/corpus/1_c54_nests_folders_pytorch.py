"""C54: leaves folders in its scratch folder and in its cache that lie in each other, more levels than functions can call themselves."""

import os
import sys

import torch.distributed as dist

LEVELS = sys.getrecursionlimit() + 100


def nest(folder):
    here = os.open(folder, os.O_RDONLY)
    for _ in range(LEVELS):
        os.mkdir("level", dir_fd=here)
        below = os.open("level", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


if dist.get_rank() == 0:
    for name in ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR"):
        os.makedirs(os.environ[name], exist_ok=True)
        if not os.listdir(os.environ[name]):  # else its cache was kept
            nest(os.environ[name])


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
