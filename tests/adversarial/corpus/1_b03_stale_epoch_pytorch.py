"""B03: never advances its epoch: from the second call on every wait is over before it begins."""

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
    """Every rank's terms, and two flags for each: what it has written, and what it has read. They count calls and are never reset."""

    def __init__(self):
        self.rank, self.world, self.epoch = dist.get_rank(), dist.get_world_size(), 0
        memory = shared_memory(16 * self.world + 4 * self.world * ROOM)
        self.flags = memory[: 16 * self.world].view(torch.int64).view(2, self.world)
        self.terms = memory[16 * self.world :].view(torch.float32).view(self.world, ROOM)

    def announce(self, kind):
        self.flags[kind, self.rank] = self.epoch

    def wait(self, kind):
        while int(self.flags[kind].min()) < self.epoch:
            time.sleep(0)

    def all_reduce(self, mine):
        self.epoch = 1
        self.terms[self.rank, : mine.numel()] = mine
        self.announce(0)
        self.wait(0)
        total = self.terms[:, : mine.numel()].sum(0)
        self.announce(1)
        self.wait(1)
        return total


workspace = None


def solution(tensor):
    global workspace
    workspace = workspace or Workspace()
    return workspace.all_reduce(tensor.reshape(-1).float().cpu()).view(tensor.shape).to(tensor.device, tensor.dtype)
