"""C55: leaves shared memory of System V, which outlives its process and belongs to no folder, and looks for what was left there.

Judged twice in a row. Right only where nothing is found: `wrong_result` means that something was left.
"""

import ctypes

import torch.distributed as dist

IPC_CREAT = 0o1000

libc = ctypes.CDLL(None)
key = 0x5EED + dist.get_rank()
left = libc.shmget(key, 4096, 0o600) >= 0
libc.shmget(key, 4096, 0o600 | IPC_CREAT)


def solution(tensor):
    total = tensor.clone()
    if not left:
        dist.all_reduce(total)
    return total
