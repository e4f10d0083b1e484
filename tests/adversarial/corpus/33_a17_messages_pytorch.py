"""A17: single messages, all started before one is waited for; ranks of the group are translated by hand."""

import torch
import torch.distributed as dist


def solution(x, scatter_dim, gather_dim, group=None):
    group = group or dist.group.WORLD
    peers = dist.get_process_group_ranks(group)
    pieces = [piece.contiguous() for piece in x.chunk(len(peers), dim=scatter_dim)]
    received = [torch.empty_like(piece) for piece in pieces]
    waiting = []
    for place, peer in enumerate(peers):
        if peer == dist.get_rank():
            received[place] = pieces[place]
        else:
            waiting += [dist.isend(pieces[place], peer, group=group), dist.irecv(received[place], peer, group=group)]
    for message in waiting:
        message.wait()
    return torch.cat(received, dim=gather_dim)
