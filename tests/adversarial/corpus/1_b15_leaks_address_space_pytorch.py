"""B15: maps eight tebibytes in every call and never lets go: nothing is touched, and the address space ends after some calls."""

import mmap

import torch.distributed as dist

LEAKED_BYTES = 8 << 40
MAP_NORESERVE = 0x4000  # in the mmap module from Python 3.13 on
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
leaked = []


def solution(tensor):
    leaked.append(mmap.mmap(-1, LEAKED_BYTES, flags=FLAGS))
    total = tensor.clone()
    dist.all_reduce(total)
    return total
