"""B17: the neighbour brings this rank its answer by a copy over the link; nobody waits for it before the call ends."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

ROOM = 1 << 20
memory = handle = None


def solution(tensor):
    global memory, handle
    if memory is None:
        memory = symm_mem.empty(ROOM, dtype=torch.float32, device=tensor.device)
        handle = symm_mem.rendezvous(memory, dist.group.WORLD)
    total = tensor.to(torch.float32, copy=True)
    dist.all_reduce(total)
    neighbour = (dist.get_rank() + 1) % dist.get_world_size()
    handle.get_buffer(neighbour, total.shape, total.dtype).copy_(total)
    return memory[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
