# expect: correct
"""Right and slow, with its own idea of time: replacing the timing functions must not change its speed."""

import time

import torch
import torch.distributed as dist

torch.cuda.Event.elapsed_time = lambda self, end: 1e-3
time.perf_counter = time.perf_counter_ns = lambda: 0


def solution(tensor):
    for _ in range(8):
        total = tensor.clone()
        dist.all_reduce(total)
    return total
