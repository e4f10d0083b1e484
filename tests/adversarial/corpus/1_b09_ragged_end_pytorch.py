"""B09: sums in vectors of eight and forgets the rest of a ragged tensor."""

import torch.distributed as dist

VECTOR = 8


def solution(tensor):
    total = tensor.clone()
    whole = total.view(-1)[: tensor.numel() // VECTOR * VECTOR]
    dist.all_reduce(whole)
    return total
