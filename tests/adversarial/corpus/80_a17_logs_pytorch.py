"""A17: stays in logarithms from the first exponent to the last, in float64."""

import math

import torch
import torch.distributed as dist


def log_sum_over_ranks(logs, group):
    """log of the sum of exp(logs) over rows and ranks; the greatest of all comes off first."""
    greatest = logs.amax(0) if len(logs) else logs.new_full(logs.shape[1:], -torch.inf)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    total = (logs - greatest).exp().sum(0)
    dist.all_reduce(total, group=group)
    return greatest + total.log()


def solution(teacher_output, teacher_temp, n_masked_patches_tensor, n_iterations=3, group=None):
    count = n_masked_patches_tensor.clone()
    dist.all_reduce(count, group=group)
    samples, prototypes = math.log(count.item()), math.log(teacher_output.shape[1])
    logs = (teacher_output.float() / teacher_temp).double()
    logs = logs - log_sum_over_ranks(logs, group).logsumexp(0)
    for _ in range(n_iterations):
        logs = logs - log_sum_over_ranks(logs, group) - prototypes
        logs = logs - logs.logsumexp(1, keepdim=True) - samples
    return (logs + samples).exp().float()
