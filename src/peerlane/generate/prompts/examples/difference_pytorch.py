"""Every rank returns its tensor minus its left neighbour's, with PyTorch and symmetric memory."""

import os

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

_shared = {}  # (number of elements, dtype) -> symmetric memory and its handle, made by the first call


def shared_memory(x):
    key = (x.numel(), x.dtype)
    if key not in _shared:
        memory = symm_mem.empty(x.numel(), dtype=x.dtype, device=x.device)
        _shared[key] = memory, symm_mem.rendezvous(memory, dist.group.WORLD)  # collective: every rank comes here in its first call
    return _shared[key]


def solution(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    memory, handle = shared_memory(x)
    memory.copy_(x.reshape(-1))
    handle.barrier(channel=0)  # all ranks have written
    left = handle.get_buffer((rank - 1) % world_size, (x.numel(),), x.dtype)
    result = x - left.view(x.shape)
    handle.barrier(channel=1)  # all ranks have read, so the next call may write
    return result
