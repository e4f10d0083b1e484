# needs: gpu
"""Problem 75, Gated DeltaNet: tokens are exchanged for heads, then flash-linear-attention's chunk_gated_delta_rule runs on the sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fla.ops.gated_delta_rule import chunk_gated_delta_rule


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
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    q, k, v, gate, beta = (to_heads(x, group) for x in (q, k, v, gate, beta))
    decay = {"use_gate_in_kernel": True, "A_log": a_log.to(torch.float32), "dt_bias": dt_bias.to(torch.float32)}
    o, _ = chunk_gated_delta_rule(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True, **decay)
    by_tokens = torch.stack(o.to(q.dtype).chunk(dist.get_world_size(group), dim=1))
    received = torch.empty_like(by_tokens)
    dist.all_to_all_single(received, by_tokens, group=group)
    return torch.cat(received.unbind(), dim=2)
