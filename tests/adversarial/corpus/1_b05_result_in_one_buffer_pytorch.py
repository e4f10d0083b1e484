"""B05: clears its part of the peers' sums as soon as it is called, though they may still hold those of the call before."""

import mmap
import os
import time

import torch
import torch.distributed as dist

ROOM = 1 << 14  # elements of the largest tensor
DEVICE = "cuda" if dist.get_backend() == "nccl" else "cpu"


def shared_memory(size):
    """Bytes that all ranks map, zero at first. The file has no name any more once every rank has it."""
    name = torch.tensor([os.getpid(), time.time_ns()], device=DEVICE)
    dist.broadcast(name, 0)
    path = "/dev/shm/peerlane-corpus-{}-{}".format(*name.tolist())
    with open(path, "a+b") as file:
        os.ftruncate(file.fileno(), size)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(path)
    return memory


class Workspace:
    """For every rank: the terms of its share, and the whole sum, which is what it returns.

    One buffer of each and no barrier at the end. Who has all sums of a call knows that every rank has read its terms; and nobody gets sums
    of the next call before it has begun it.
    """

    def __init__(self):
        self.rank, self.world, self.epoch = dist.get_rank(), dist.get_world_size(), 0
        flags, terms = 16 * self.world**2, 4 * self.world**2 * ROOM
        memory = shared_memory(flags + terms + 4 * self.world * ROOM)
        self.flags = memory[:flags].view(torch.int64).view(2, self.world, self.world)  # kind, reader, writer
        self.terms = memory[flags : flags + terms].view(torch.float32).view(self.world, self.world, ROOM)  # reader, writer
        self.sums = memory[flags + terms :].view(self.world, 4 * ROOM)

    def announce(self, kind):
        self.flags[kind, :, self.rank] = self.epoch

    def wait(self, kind):
        while int(self.flags[kind, self.rank].min()) < self.epoch:
            time.sleep(0)

    def all_reduce(self, mine, dtype):
        self.epoch += 1
        sums, share = self.sums.view(dtype), -(-mine.numel() // self.world)
        time.sleep(0.002)  # for what a call does before it needs its peers, such as a product
        sums[:, self.rank * share : (self.rank + 1) * share] = 0
        for peer, part in enumerate(mine.split(share) if share else ()):
            self.terms[peer, self.rank, : part.numel()] = part
        self.announce(0)
        self.wait(0)
        sums[:, self.rank * share : (self.rank + 1) * share] = self.terms[self.rank, :, :share].sum(0).to(dtype)
        self.announce(1)
        self.wait(1)
        return sums[self.rank, : mine.numel()]


workspace = None


def solution(tensor):
    global workspace
    workspace = workspace or Workspace()
    return workspace.all_reduce(tensor.reshape(-1).float().cpu(), tensor.dtype).view(tensor.shape).to(tensor.device)
