"""A17: exchanges bytes with one partner at a time, found by an exclusive or; the lower of the two sends first."""

import torch
import torch.distributed as dist


def solution(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = tensor.contiguous().clone().view(world, -1) if tensor.numel() else tensor.clone()
    if not tensor.numel():
        return blocks
    received = blocks.clone()
    for distance in range(1, world):
        partner = rank ^ distance
        out, into = blocks[partner].view(torch.uint8), received[partner].view(torch.uint8)
        if rank < partner:
            dist.send(out, partner)
            dist.recv(into, partner)
        else:
            dist.recv(into, partner)
            dist.send(out, partner)
    return received.view(tensor.shape)
