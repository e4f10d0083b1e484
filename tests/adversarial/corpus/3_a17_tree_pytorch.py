"""A17: a binomial tree of messages, counted from the root."""

import torch.distributed as dist


def solution(tensor, src=0):
    world, held = dist.get_world_size(), tensor.contiguous().clone()
    place, reach = (dist.get_rank() - src) % world, 1
    while reach < world and held.numel():
        if place < reach and place + reach < world:
            dist.send(held, (place + reach + src) % world)
        elif reach <= place < 2 * reach:
            dist.recv(held, (place - reach + src) % world)
        reach *= 2
    return held
