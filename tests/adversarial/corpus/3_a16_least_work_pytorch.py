"""A16: the least that any problem asks for, a broadcast: what is measured is nearly the hand-off alone."""

import torch
import torch.distributed as dist


def solution(tensor, src=0):
    received = tensor.clone() if dist.get_rank() == src else torch.empty_like(tensor)
    dist.broadcast(received, src=src)
    return received
