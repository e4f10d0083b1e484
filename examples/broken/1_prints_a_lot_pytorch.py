# expect: correct
"""Prints more than a pipe holds, in every call: nobody may have to read it for the candidate to go on."""

import torch.distributed as dist


def solution(tensor):
    print("all is well\n" * 100_000)
    total = tensor.clone()
    dist.all_reduce(total)
    return total
