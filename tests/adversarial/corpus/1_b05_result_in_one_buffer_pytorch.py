"""B05: returns the buffer that peers write to in their next call, which may begin long before its own does."""

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
    """Every rank's sum, which the others clear, and the terms. A call ends with a barrier."""

    def __init__(self):
        self.rank, self.world, self.epoch = dist.get_rank(), dist.get_world_size(), 0
        memory = shared_memory(16 * self.world + 8 * self.world * ROOM)
        self.flags = memory[: 16 * self.world].view(torch.int64).view(2, self.world)
        self.sums, self.terms = memory[16 * self.world :].view(torch.float32).view(2, self.world, ROOM)

    def all_reduce(self, tensor):
        self.epoch += 1
        count = tensor.numel()
        time.sleep(0.002)  # for what a call does before it needs its peers, such as a product
        for rank in set(range(self.world)) - {self.rank}:
            self.sums[rank].zero_()
        self.terms[self.rank, :count] = tensor.reshape(-1)
        self.meet(0)
        total = self.sums[self.rank].view(tensor.dtype)[:count]
        total.copy_(self.terms[:, :count].sum(0))
        self.meet(1)
        return total.view(tensor.shape)

    def meet(self, place):
        self.flags[place, self.rank] = self.epoch
        while int(self.flags[place].min()) < self.epoch:
            time.sleep(0)


workspace = None


def solution(tensor):
    global workspace
    workspace = workspace or Workspace()
    return workspace.all_reduce(tensor)
