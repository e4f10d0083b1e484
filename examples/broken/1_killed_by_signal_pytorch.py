# expect: runtime_error
"""One rank's process dies of a signal, as after a segmentation fault."""

import os
import signal

import torch.distributed as dist


def solution(tensor):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = tensor.clone()
    dist.all_reduce(total)
    return total
