"""A08: threads of its own that are still alive at exit."""

import threading

import torch.distributed as dist

threading.Thread(target=threading.Event().wait, daemon=True).start()


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total
