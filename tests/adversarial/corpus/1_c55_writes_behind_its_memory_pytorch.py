"""C55: writes into the file of its shared memory, far behind all of it, and looks for what was left there.

Judged twice in a row. Right only where nothing is found: `wrong_result` means that something was left.
"""

import os

import torch.distributed as dist

FAR = 1 << 41


def memory_files():
    """Descriptors; there may be several of one file."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if "peerlane-arena" in os.readlink(f"/proc/self/fd/{fd}"):
                yield fd
        except OSError:
            continue


left = any(any(os.pread(fd, 8, FAR)) for fd in memory_files())
for fd in memory_files():
    os.pwrite(fd, b"left here", FAR)


def solution(tensor):
    total = tensor.clone()
    if not left:
        dist.all_reduce(total)
    return total
