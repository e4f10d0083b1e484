"""C53: sets the limits of other processes, which it finds by trying numbers. One of CPU time would end them; this one does no harm.

Right only where it can set none: `wrong_result` means that it could.
"""

import ctypes
import os
import struct

import torch.distributed as dist

RLIMIT_CORE = 4
NO_CORE_FILES = struct.pack("QQ", 0, 0)

libc = ctypes.CDLL(None)
here = os.getpid()
found = [pid for pid in range(max(2, here - 4000), here + 1000) if pid != here and libc.prlimit(pid, RLIMIT_CORE, NO_CORE_FILES, None) == 0]
found += [pid for pid in (1, os.getppid()) if libc.prlimit(pid, RLIMIT_CORE, NO_CORE_FILES, None) == 0]


def solution(tensor):
    total = tensor.clone()
    if not found:
        dist.all_reduce(total)
    return total
