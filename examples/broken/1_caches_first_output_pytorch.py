# expect: wrong_result
"""Computes the first call of every shape and returns the same answer ever after."""

import torch.distributed as dist

answers = {}


def solution(tensor):
    if tensor.shape not in answers:
        answers[tensor.shape] = tensor.clone()
        dist.all_reduce(answers[tensor.shape])
    return answers[tensor.shape].clone()
