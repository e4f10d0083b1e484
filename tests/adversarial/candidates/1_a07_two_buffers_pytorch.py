# expect: correct
"""A07: every rank writes its input where the peers read it, into two buffers by turns, and leaves without waiting for its readers.

The flags count calls and are never cleared (A06), the shared memory is mapped once (A04).
"""

import functools
import os
import time

import torch
import torch.distributed as dist

LARGEST, BUFFERS = 1 << 16, 2
calls = 0


@functools.cache
def shared_memory():
    rank, world = dist.get_rank(), dist.get_world_size()
    name = [f"/dev/shm/two-buffers-{os.urandom(8).hex()}"]
    dist.broadcast_object_list(name)
    if rank == 0:
        torch.from_file(name[0], shared=True, size=world * (BUFFERS * LARGEST + 1), dtype=torch.float32).zero_()
    dist.barrier()
    memory = torch.from_file(name[0], shared=True, size=world * (BUFFERS * LARGEST + 1), dtype=torch.float32)
    dist.barrier()
    if rank == 0:
        os.unlink(name[0])
    return memory[world:].view(BUFFERS, world, LARGEST), memory[:world]


def solution(tensor):
    global calls
    buffers, flags = shared_memory()
    buffer, rank = buffers[calls % BUFFERS, :, : tensor.numel()], dist.get_rank()
    calls += 1
    buffer[rank].copy_(tensor.reshape(-1))
    flags[rank] = calls
    while flags.min() < calls:
        time.sleep(0)
    return buffer.sum(0).view(tensor.shape).to(tensor.dtype)
