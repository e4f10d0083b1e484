"""A13: small tensors in one collective and one sum, large ones in two shots. The size alone decides, so all ranks decide alike."""

import torch
import torch.distributed as dist

ONE_SHOT_ELEMENTS = 1024


def solution(tensor):
    world, size = dist.get_world_size(), tensor.numel()
    flat = tensor.reshape(-1).float()
    if size <= ONE_SHOT_ELEMENTS:
        terms = flat.new_empty(world, size)
        dist.all_gather(list(terms), flat)
        return terms.sum(0).view(tensor.shape).to(tensor.dtype)
    share = -(-size // world)
    padded = torch.nn.functional.pad(flat, (0, share * world - size))
    terms = torch.empty_like(padded)
    dist.all_to_all_single(terms, padded)
    total = terms.view(world, share).sum(0)
    whole = total.new_empty(world, share)
    dist.all_gather(list(whole), total)
    return whole.view(-1)[:size].view(tensor.shape).to(tensor.dtype)
