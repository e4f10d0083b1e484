"""Problem 33, all-to-all from one axis to another: one message to every rank of the group, by isend and irecv."""

from __future__ import annotations

import torch
import torch.distributed as dist


def solution(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    blocks = [block.contiguous() for block in x.chunk(world, dim=scatter_dim)]
    received = [blocks[rank] if peer == rank else torch.empty_like(blocks[peer]) for peer in range(world)]
    peers = [(rank + step) % world for step in range(1, world)]
    sends = [dist.isend(blocks[peer], group=group, group_dst=peer) for peer in peers]
    receives = [dist.irecv(received[peer], group=group, group_src=peer) for peer in reversed(peers)]
    for request in (*receives, *sends):
        request.wait()
    return torch.cat(received, dim=gather_dim)
