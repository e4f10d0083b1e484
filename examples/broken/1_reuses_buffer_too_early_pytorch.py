# expect: unstable on cpu
"""Right at rest, wrong back to back: a rank's next call overwrites terms that its peers still add up. One barrier at the end is missing."""

import mmap
import os
import time

import torch
import torch.distributed as dist

ROOM = 1 << 14  # elements of the largest tensor


def shared_memory(size):
    """Returns bytes that all ranks map, zero at first."""
    name = torch.tensor([os.getpid(), time.time_ns()])
    dist.broadcast(name, 0)
    path = "/dev/shm/peerlane-example-{}-{}".format(*name.tolist())
    with open(path, "a+b") as file:
        os.ftruncate(file.fileno(), size)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(path)
    return memory


class Terms:
    """The terms of all ranks, and a counter of calls for each."""

    def __init__(self):
        self.rank, world, self.calls = dist.get_rank(), dist.get_world_size(), 0
        memory = shared_memory(8 * world + 4 * world * ROOM)
        self.written = memory[: 8 * world].view(torch.int64)
        self.terms = memory[8 * world :].view(torch.float32).view(world, ROOM)

    def all_reduce(self, mine):
        self.calls += 1
        self.terms[self.rank, : mine.numel()] = mine
        self.written[self.rank] = self.calls
        while int(self.written.min()) < self.calls:
            time.sleep(0)
        if self.rank == 0:
            time.sleep(0.005)  # this rank is slow, as a GPU with more to do; nothing makes its peers wait for it
        return self.terms[:, : mine.numel()].sum(0)


terms = None


def solution(tensor):
    global terms
    terms = terms or Terms()
    return terms.all_reduce(tensor.reshape(-1).float()).view(tensor.shape).to(tensor.dtype)
