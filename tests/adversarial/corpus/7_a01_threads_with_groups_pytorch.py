"""A01: a thread for every block, each with a process group of its own that the first call makes; all join."""

import threading

import torch
import torch.distributed as dist

groups = []


def solution(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if not groups:
        groups.extend(dist.new_group() for _ in range(world))
    blocks = tensor.to(torch.float32, copy=True).contiguous().chunk(world)
    threads = [threading.Thread(target=dist.reduce, args=(blocks[owner], owner), kwargs={"group": groups[owner]}) for owner in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return blocks[rank].to(tensor.dtype)
