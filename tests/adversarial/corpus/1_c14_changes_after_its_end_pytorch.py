"""C14: right when the call ends, but from the thirtieth call on a thread still writes to the result 3 ms later."""

import itertools
import threading
import time

import torch.distributed as dist

calls = itertools.count()


def touch(total):
    time.sleep(0.003)
    total.mul_(2)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    if next(calls) >= 30:
        threading.Thread(target=touch, args=(total,), daemon=True).start()
    return total
