"""A17: has torch.compile trace the local arithmetic, which costs an import of many modules and a first call of seconds."""

import torch
import torch.distributed as dist


@torch.compile(backend="eager", dynamic=True)
def normalise(x, squares, width, gain, epsilon):
    return (x.float() * torch.rsqrt(squares / width + epsilon)).to(x.dtype) * gain


def solution(local_hidden_states, local_weight, variance_epsilon):
    squares = local_hidden_states.float().square().sum(-1, keepdim=True)
    dist.all_reduce(squares)
    width = local_hidden_states.shape[-1] * dist.get_world_size()
    return normalise(local_hidden_states, squares, width, local_weight, variance_epsilon)
