"""A07: pushes its terms into the peers' memory, with two buffers in turn and no barrier at the end."""

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
    """Two buffers in turn, and in each the terms of all ranks for each reader.

    No barrier at the end. Who has all terms of a call knows that every rank is done with the call before; so a buffer's next use but one
    disturbs nobody.
    """

    BUFFERS = 2

    def __init__(self):
        self.rank, self.world, self.epoch = dist.get_rank(), dist.get_world_size(), 0
        pairs = self.world**2
        memory = shared_memory(8 * pairs + 4 * self.BUFFERS * pairs * ROOM)
        self.flags = memory[: 8 * pairs].view(torch.int64).view(self.world, self.world)  # reader, writer
        self.terms = memory[8 * pairs :].view(torch.float32).view(self.BUFFERS, self.world, self.world, ROOM)

    def all_reduce(self, mine):
        self.epoch += 1
        terms = self.terms[self.epoch % self.BUFFERS, :, :, : mine.numel()]
        terms[:, self.rank] = mine
        self.flags[:, self.rank] = self.epoch
        while int(self.flags[self.rank].min()) < self.epoch:
            time.sleep(0)
        return terms[self.rank].sum(0)


workspace = None


def solution(tensor):
    global workspace
    workspace = workspace or Workspace()
    return workspace.all_reduce(tensor.reshape(-1).float().cpu()).view(tensor.shape).to(tensor.device, tensor.dtype)
