"""Problem 57, the backward pass of attention over a sequence in shards, averaged over replicas.

Nothing circulates. Two launches gather the shards and the two numbers of each query. Every rank computes the gradients of its own shard, in
a fixed order and in float32, with weights from the logarithms. The products are torch's. The average is the kit's all-reduce."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from peerlane.device import Group, communicator, group_of

SCORES_AT_ONCE = 1 << 28


def solution(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ring = group_of(cp_group)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    shards = gathered(ring, torch.stack((dout, q, k, v)))
    numbers = gathered(ring, torch.stack((softmax_lse, delta)))
    results = torch.empty((3, *q.shape), dtype=q.dtype, device=q.device)
    length, heads = q.shape[1:3]
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * length**2))
    for first in range(0, heads, step):
        part = slice(first, first + step)
        # (W, 4, B, h, S, D) in float32, and (W, 2, B, h, S, 1)
        wide, known = shards[:, :, :, :, part].transpose(3, 4).float(), numbers[:, :, :, part].unsqueeze(-1)
        gradients = torch.zeros_like(wide[0, :3])
        for other in range(ring.world_size):
            if not causal or other <= ring.rank:  # own queries
                ds, _ = weights(wide[ring.rank], known[ring.rank], wide[other], scale, causal and other == ring.rank)
                gradients[0] += torch.matmul(ds, wide[other, 2])
            if not causal or other >= ring.rank:  # own keys
                ds, p = weights(wide[other], known[other], wide[ring.rank], scale, causal and other == ring.rank)
                gradients[1] += torch.matmul(ds.transpose(-1, -2), wide[other, 1])
                gradients[2] += torch.matmul(p.transpose(-1, -2), wide[other, 0])
        gradients[:2] *= scale
        results[:, :, :, part] = gradients.transpose(2, 3).to(q.dtype)
    if dp_group is not None and (replicas := group_of(dp_group)).world_size > 1:
        communicator(replicas).all_reduce(results)
        results = results / replicas.world_size
    return results[0], results[1], results[2]


def gathered(group: Group, own: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, in rank order."""
    if group.world_size == 1:
        return own.unsqueeze(0)
    everyone = own.new_empty((group.world_size, *own.shape))
    communicator(group).all_gather_into_tensor(everyone, own)
    return everyone


def weights(
    queries: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor, scale: float, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the scores of one shard's queries with another's keys, without the scale, and their weights, (B, h, S, S).

    ``queries`` and ``keys`` hold dout, q, k and v of a shard, ``numbers`` logarithms and delta."""
    scores = torch.matmul(queries[1], keys[2].transpose(-1, -2)) * scale
    if masked:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    p = scores.sub_(numbers[0]).exp_()
    return torch.matmul(queries[0], keys[3].transpose(-1, -2)).sub_(numbers[1]).mul_(p), p
