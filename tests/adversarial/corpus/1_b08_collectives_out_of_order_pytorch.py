"""B08: rank 0 calls its two collectives in another order than the rest."""

import torch
import torch.distributed as dist


def solution(tensor):
    total, note = tensor.clone(), torch.zeros(3, device=tensor.device)
    parts = [total, note] if dist.get_rank() else [note, total]
    for part in parts:
        dist.all_reduce(part)
    return total
