# needs: gpu
"""Problem 74, Kimi Delta Attention: tokens are exchanged for heads, then flash-linear-attention's chunk_kda runs on the sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fla.ops.kda import chunk_kda


def to_heads(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All tokens of the rank's heads: (B, L, H, ...) to (B, W L, H / W, ...)."""
    blocks = torch.stack(x.chunk(dist.get_world_size(group), dim=2))
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return torch.cat(received.unbind(), dim=1)


def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(cp_group), dist.get_world_size(cp_group)
    a_log, dt_bias = (x.to(torch.float32).chunk(ranks)[rank].contiguous() for x in (a_log, dt_bias))
    q, k, v, g, beta = (to_heads(x, cp_group) for x in (q, k, v, g, beta))
    decay = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, "A_log": a_log, "dt_bias": dt_bias}
    o, _ = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, **decay)
    by_tokens = torch.stack(o.to(q.dtype).chunk(ranks, dim=1))
    received = torch.empty_like(by_tokens)
    dist.all_to_all_single(received, by_tokens, group=cp_group)
    result = torch.cat(received.unbind(), dim=2)
    if tp_group is not None:
        dist.all_reduce(result, group=tp_group)
    return result
