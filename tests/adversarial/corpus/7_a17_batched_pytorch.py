"""A17: one batch of messages, a block to every peer and one from each, added up in float64."""

import torch
import torch.distributed as dist


def solution(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = tensor.contiguous().chunk(world)
    terms = torch.empty((world, *blocks[rank].shape), dtype=tensor.dtype, device=tensor.device)
    terms[rank] = blocks[rank]
    messages = []
    for peer in range(world):
        if peer != rank and terms[peer].numel():
            messages += [dist.P2POp(dist.isend, blocks[peer], peer), dist.P2POp(dist.irecv, terms[peer], peer)]
    for message in dist.batch_isend_irecv(messages) if messages else ():
        message.wait()
    return terms.double().sum(0).to(tensor.dtype)
