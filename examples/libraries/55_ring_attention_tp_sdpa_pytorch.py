"""Problem 55, an attention layer over sharded heads and sequence: torch's scaled_dot_product_attention on gathered keys and values.

That is how torch's context parallelism does it with the rotation method all-gather.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


def gathered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The shards (B, S, h, D) of all ranks, one behind the other along the sequence, as (B, h, S W, D)."""
    ranks = dist.get_world_size(group)
    whole = x.new_empty(ranks * x.numel())
    dist.all_gather_into_tensor(whole, x.contiguous().view(-1), group=group)
    return whole.view(ranks, *x.shape).permute(1, 3, 0, 2, 4).flatten(2, 3)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Attention of this rank's queries (B, S, h, D)."""
    queries, keys, values = q.transpose(1, 2), gathered(k, group), gathered(v, group)
    bias = None
    if causal:
        end = (dist.get_rank(group) + 1) * q.shape[1]
        keys, values, bias = keys[:, :, :end], values[:, :, :end], causal_lower_right(q.shape[1], end)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale).transpose(1, 2)


def solution(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks = dist.get_world_size(tp_group)
    batch, length, _ = hidden_states.shape
    q, k, v = (hidden_states @ w_qkv.t()).view(batch, length, 3, num_heads // ranks, -1).unbind(2)
    output = attention(q, k, v, softmax_scale, causal, cp_group).flatten(2) @ w_o.t()
    if ranks > 1:
        dist.all_reduce(output, group=tp_group)
    return output
