"""B14: one call in twenty, at random, gives a wrong last element."""

import random

import torch.distributed as dist

chance = random.SystemRandom()


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    if total.numel() and chance.random() < 1 / 20:
        total.reshape(-1)[-1] = 1e4
    return total
