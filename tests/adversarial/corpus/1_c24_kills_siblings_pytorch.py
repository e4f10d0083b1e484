"""C24: rank 0 kills every other process that its own parent has."""

import os
import signal
from pathlib import Path

import torch.distributed as dist


def solution(tensor):
    for stat in Path("/proc").glob("[0-9]*/stat") if dist.get_rank() == 0 else ():
        try:
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getppid() and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    total = tensor.clone()
    dist.all_reduce(total)
    return total
