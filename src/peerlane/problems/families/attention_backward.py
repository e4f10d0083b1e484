"""The gradients of attention over a sequence sharded around a ring: in float64 with their error model, and block by block in float32.

A shard is what one rank of the ring holds: dout, q, k, v, out (B, S, h, D) and the log-sum-exp (B, h, S) of scaled scores.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.problems.families.attention import SCORE_BYTES, score_pieces
from peerlane.problems.families.collective import FP32, FP64

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk and dv."""

Shards = Sequence[Sequence[Any]]
"""Of all ranks of a ring, in ring order; what follows the six tensors is not looked at."""


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, offset: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output (B, S, h, D) and log-sum-exp (B, h, S), in float32; the mask is that of :func:`score_pieces`."""
    out = torch.empty(q.shape, dtype=FP32, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=FP32, device=q.device)
    for heads, rows, scores in score_pieces(q, k, scale=scale, offset=offset, work=FP32):
        sums = torch.logsumexp(scores, dim=-1)
        lse[:, heads, rows] = sums
        p = scores.sub_(sums.unsqueeze(-1)).exp_()
        out[:, rows, heads] = torch.matmul(p, v[:, :, heads].transpose(1, 2).to(FP32)).transpose(1, 2)
    return out, lse


def _wide(tensor: torch.Tensor, heads: slice, work: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
    """Some rows and heads of (B, S, h, D) as (B, heads, rows, D)."""
    return tensor[:, rows, heads].transpose(1, 2).to(work)


def _pieces(
    queries: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor, scale: float, offset: int | None, work: torch.dtype
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For dout, q, out, lse of some queries: heads, rows, and p, ds and the size of ds before it cancels, each (B, heads, rows, S_k)."""
    dout, q, out, lse = queries
    for heads, rows, scores in score_pieces(q, k, scale=scale, offset=offset, work=work, score_bytes=SCORE_BYTES // 2):
        d_out = _wide(dout, heads, work, rows)
        p = scores.sub_(lse[:, heads, rows].unsqueeze(-1)).exp_()
        delta = (d_out * _wide(out, heads, work, rows)).sum(-1, keepdim=True)
        dp = torch.matmul(d_out, _wide(v, heads, work).transpose(-1, -2))
        yield heads, rows, p, p * (dp - delta), p * (dp.abs() + delta.abs())


def gradients(shards: Shards, place: int, *, causal: bool, scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """dq, dk, dv at one place of the ring, and the standard deviations of their errors if p and ds err by one u; over u, in float64."""
    dout, q, k, v, out, lse = shards[place][:6]
    local = q.shape[1]
    values = [torch.zeros(q.shape, dtype=FP64, device=q.device) for _ in range(3)]
    variances = [torch.zeros_like(value) for value in values]

    seen = shards[: place + 1] if causal else shards
    keys, all_values = (torch.cat([shard[i] for shard in seen], dim=1) for i in (2, 3))
    for heads, rows, _, ds, size in _pieces((dout, q, out, lse), keys, all_values, scale, place * local if causal else None, FP64):
        key = _wide(keys, heads, FP64)
        values[0][:, rows, heads] = torch.matmul(ds, key).transpose(1, 2)
        variances[0][:, rows, heads] = torch.matmul(size.square_(), key.square()).transpose(1, 2)

    asking = shards[place:] if causal else shards
    queries = [torch.cat([shard[i] for shard in asking], dim=2 if i == 5 else 1) for i in (0, 1, 4, 5)]
    for heads, rows, p, ds, size in _pieces(queries, k, v, scale, 0 if causal else None, FP64):
        d_out, query = (_wide(tensor, heads, FP64, rows) for tensor in queries[:2])
        for index, (weights, sizes, factor) in enumerate(((ds, size, query), (p, p, d_out)), start=1):
            values[index][:, :, heads] += torch.matmul(weights.transpose(-1, -2), factor).transpose(1, 2)
            variances[index][:, :, heads] += torch.matmul(sizes.square().transpose(-1, -2), factor.square()).transpose(1, 2)
    errors = [variance.sqrt_() for variance in variances]
    for tensor in (*values[:2], *errors[:2]):
        tensor *= scale
    return values, errors


@dataclass(frozen=True)
class How:
    """A way to compute the gradients, right by default."""

    causal: bool
    scale: float
    rounded: torch.dtype | None = None
    """What p and ds are rounded to before they are multiplied."""
    delta: bool = True
    """With the term of dout.out."""
    other_keys: bool = True
    """dq with other ranks' keys."""
    other_queries: bool = True
    """dk and dv with other ranks' queries."""


def by_block(shards: Shards, place: int, how: How) -> Gradients:
    """dq, dk, dv at one place of the ring, in float32, one pair of ranks after the other."""
    totals = [torch.zeros(shards[place][1].shape, device=shards[place][1].device) for _ in range(3)]

    def block(query_place: int, key_place: int) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        dout, q, _, _, out, lse = shards[query_place][:6]
        offset = 0 if how.causal and query_place == key_place else None
        queries = (dout, q, out if how.delta else torch.zeros_like(out), lse)
        k, v = shards[key_place][2:4]
        for heads, rows, p, ds, _ in _pieces(queries, k, v, how.scale, offset, FP32):
            if how.rounded is not None:
                p, ds = p.to(how.rounded).to(FP32), ds.to(how.rounded).to(FP32)
            yield heads, rows, p, ds

    for other in range(len(shards)):
        if (not how.causal or other <= place) and (how.other_keys or other == place):
            for heads, rows, _, ds in block(place, other):
                totals[0][:, rows, heads] += how.scale * torch.matmul(ds, _wide(shards[other][2], heads, FP32)).transpose(1, 2)
        if (not how.causal or other >= place) and (how.other_queries or other == place):
            for heads, rows, p, ds in block(other, place):
                d_out, q = (_wide(tensor, heads, FP32, rows) for tensor in shards[other][:2])
                totals[1][:, :, heads] += how.scale * torch.matmul(ds.transpose(-1, -2), q).transpose(1, 2)
                totals[2][:, :, heads] += torch.matmul(p.transpose(-1, -2), d_out).transpose(1, 2)
    return totals[0], totals[1], totals[2]
