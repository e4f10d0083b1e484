"""B15: allocates new symmetric memory in every call and keeps it."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

LEAKED_BYTES = 8 << 30
leaked = []


def solution(tensor):
    leaked.append(symm_mem.empty(LEAKED_BYTES, dtype=torch.uint8, device=tensor.device))
    total = tensor.clone()
    dist.all_reduce(total)
    return total
