"""A17: a tree of partial sums in float64, folded towards the root."""

import torch
import torch.distributed as dist


def solution(tensor, dst=0):
    world, total = dist.get_world_size(), tensor.contiguous().double()
    place, distance = (dist.get_rank() - dst) % world, 1
    other = torch.empty_like(total)
    while distance < world and total.numel():
        if place % (2 * distance) == distance:
            dist.send(total, (place - distance + dst) % world)
        elif place % (2 * distance) == 0 and place + distance < world:
            dist.recv(other, (place + distance + dst) % world)
            total += other
        distance *= 2
    return total.to(tensor.dtype) if place == 0 else tensor.clone()
