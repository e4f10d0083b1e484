"""A06: every element travels with the number of its call, and nothing is ever cleared or waited for but the data."""

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
    """Packets of one element and its epoch, in one word; two buffers in turn, never cleared: an old epoch is as good as an empty place."""

    def __init__(self):
        self.rank, self.world, self.epoch = dist.get_rank(), dist.get_world_size(), 0
        memory = shared_memory(16 * self.world * self.world * ROOM)
        self.packets = memory.view(torch.int64).view(2, self.world, self.world, ROOM)  # buffer, reader, writer

    def all_reduce(self, mine):
        if not mine.numel():
            return mine
        self.epoch += 1
        buffer = self.packets[self.epoch % 2, :, :, : mine.numel()]
        buffer[:, self.rank] = (self.epoch << 32) | (mine.view(torch.int32).long() & 0xFFFFFFFF)
        while True:
            packets = buffer[self.rank].clone()
            if ((packets >> 32) == self.epoch).all():
                return packets.int().view(torch.float32).sum(0)
            time.sleep(0)


workspace = None


def solution(tensor):
    global workspace
    workspace = workspace or Workspace()
    return workspace.all_reduce(tensor.reshape(-1).float().cpu()).view(tensor.shape).to(tensor.device, tensor.dtype)
