"""Attention over a sharded sequence by torch.distributed: what CPU ranks compute, and GPU ranks that the kit cannot join.

Keys and values are gathered; scores are computed at once, in float32 at least. Sums have the same order on every rank.
"""

import torch

from peerlane.ops.groups import rank, world_size
from peerlane.ops.transport import gathered, transport

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _gather_sequence(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the shards (B, S, h, D) of all ranks as one tensor (B, h, W S, D)."""
    return gathered(x.transpose(0, 1), name).permute(1, 2, 0, 3)


def _scatter_sequence(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns this rank's shard (B, S, h, D) of the sum of all ranks' (B, h, W S, D)."""
    rows = x.permute(2, 0, 1, 3).contiguous()
    own = rows.new_empty((rows.shape[0] // world_size(name), *rows.shape[1:]))
    transport(rows, name).reduce_scatter_tensor(own, rows)
    return own.transpose(0, 1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_key_heads(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Returns (B, S, h, D) as (B, h_kv, G, S, D)."""
    batch, length, heads, depth = x.shape
    return _wide(x.transpose(1, 2)).view(batch, key_heads, heads // key_heads, length, depth)


def _operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> Tensors:
    """Returns own queries (B, h_kv, G, S, D), and all keys and values (B, h_kv, 1, W S, D), in float32 at least."""
    queries = _by_key_heads(q, k.shape[2])
    keys, values = (_wide(_gather_sequence(tensor, name)).unsqueeze(2) for tensor in (k, v))
    return queries, keys, values


def _hidden(queries: torch.Tensor, keys: torch.Tensor, causal: bool, name: str) -> torch.Tensor:
    """Returns which keys each of this rank's queries does not see, (S, W S)."""
    later = torch.ones(queries.shape[-2], keys.shape[-2], dtype=torch.bool, device=queries.device)
    return later.triu_(rank(name) * queries.shape[-2] + 1) if causal else ~later


def _of_visible(weights: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns ``weights @ rows``, where a hidden row of NaN or infinity is no part of any sum: its weight of 0 would not keep it out."""
    bad = ~rows.isfinite()
    seen = torch.matmul((~hidden).to(rows.dtype), bad.to(rows.dtype)) > 0
    return torch.where(seen, torch.matmul(weights, rows), torch.matmul(weights, rows.masked_fill(bad, 0)))


def _weights(queries: torch.Tensor, keys: torch.Tensor, scale: float, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns softmax weights (B, h_kv, G, S, W S) and logarithms of sums of exponentials (B, h_kv, G, S)."""
    scores = (torch.matmul(queries, keys.transpose(-1, -2)) * scale).masked_fill(hidden, float("-inf"))
    logarithms = scores.logsumexp(-1)
    return (scores - logarithms.unsqueeze(-1)).exp(), logarithms


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: returns attention (B, S, h, D_v) of this rank's queries to all keys, and its logarithms (B, h, S) in float32."""
    queries, keys, values = _operands(q, k, v, name)
    hidden = _hidden(queries, keys, causal, name)
    weights, logarithms = _weights(queries, keys, scale, hidden)
    out = _of_visible(weights, values, hidden).flatten(1, 2).transpose(1, 2)
    return out.to(q.dtype).contiguous(), logarithms.flatten(1, 2).float()


def attend_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, name: str
) -> Tensors:
    """Collective: returns the gradients of :func:`attend` with respect to this rank's q, k and v."""
    queries, keys, values = _operands(q, k, v, name)
    hidden = _hidden(queries, keys, causal, name)
    weights, _ = _weights(queries, keys, scale, hidden)
    grad = _by_key_heads(dout, k.shape[2])
    towards = torch.matmul(grad, values.transpose(-1, -2)).masked_fill(hidden, 0)
    scores = weights * (towards - (towards * weights).sum(-1, keepdim=True)) * scale
    dq = _of_visible(scores, keys, hidden).flatten(1, 2).transpose(1, 2)
    dk = torch.matmul(scores.transpose(-1, -2), queries).sum(2)
    dv = torch.matmul(weights.transpose(-1, -2), grad).sum(2)
    return dq.to(q.dtype), _scatter_sequence(dk, name).to(k.dtype), _scatter_sequence(dv, name).to(v.dtype)
