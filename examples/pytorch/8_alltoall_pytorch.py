"""Problem 8, all-to-all: one batch of sends and receives, into a buffer that is made once and returned by every call.

That is allowed (a result must stay valid until the next call), and the result says so: ``aliased_output``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


def solution(tensor: torch.Tensor) -> torch.Tensor:
    key = (tensor.shape, tensor.dtype)
    if key not in buffers:
        buffers[key] = torch.empty_like(tensor)
    rank, world = dist.get_rank(), dist.get_world_size()
    received, sent = buffers[key].chunk(world), tensor.chunk(world)
    received[rank].copy_(sent[rank])
    peers = [(rank + step) % world for step in range(1, world)]
    transfers = [dist.P2POp(dist.isend, sent[peer], peer) for peer in peers]
    transfers += [dist.P2POp(dist.irecv, received[peer], peer) for peer in peers]
    for request in dist.batch_isend_irecv(transfers):
        request.wait()
    return buffers[key]
