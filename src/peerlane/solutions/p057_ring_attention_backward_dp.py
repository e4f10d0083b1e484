"""Problem 57, the backward pass of attention over a sequence in shards, averaged over replicas.

Nothing circulates. Two launches gather the shards and the two numbers of each query. Every rank computes the gradients of its own shard by
two kernels of ``device/include/peerlane/attention_backward.cuh``, in a fixed order. float32, which their tensor cores do not take, is
computed by torch. The average is the kit's all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.attention.ring_backward import attend_over_ranks_backward


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
    gradients = attend_over_ranks_backward(dout, q, k, v, out, softmax_lse, scale=softmax_scale, causal=causal, group=group_of(cp_group))
    if dp_group is None or (replicas := group_of(dp_group)).world_size == 1:
        return gradients
    results = torch.stack(gradients)
    communicator(replicas).all_reduce(results)
    results = results / replicas.world_size
    return results[0], results[1], results[2]
