"""Dispatch and combine by collectives that move and by indexing: where no kernel serves, as on CPU ranks.

The host reads no counts here either. Every rank gathers all tokens, and sends home a sum for every token; so it takes W times the memory
that it needs. Results are those of the kernels, in any dtype."""

import torch

from peerlane.device.moe.dispatch import FP8, SCALE_COLUMNS, Received, Routing
from peerlane.device.products.quantised import quantise_parts
from peerlane.ops.groups import rank
from peerlane.ops.transport import gathered, transport


def dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, routing: Routing, group: str) -> Received:
    """Does the same as :class:`peerlane.device.moe.dispatch.TokenDispatch`; rows that nobody sends are zero."""
    own, capacity, alignment = routing.num_local_experts, routing.capacity, routing.alignment
    local = _of_all(topk_idx, routing, group, -1) - rank(group) * own
    is_here = (local >= 0) & (local < own)
    expert = torch.where(is_here, local, own).flatten()
    counts = torch.zeros(own + 1, dtype=torch.int64, device=x.device).index_add_(0, expert, torch.ones_like(expert))
    room = (counts + alignment - 1) // alignment * alignment
    begin, first = room.cumsum(0) - room, counts.cumsum(0) - counts
    order = expert.argsort(stable=True)
    row = torch.empty_like(expert)
    row[order] = torch.arange(expert.numel(), device=x.device) + (begin - first)[expert[order]]
    row = torch.where(row < capacity, row, -2)
    sources = torch.where(is_here, row.view_as(local), -1).int()
    weights = None
    if topk_weights is not None:
        of_all = _of_all(topk_weights, routing, group, 0)
        weights = _placed(of_all.flatten().unsqueeze(1), sources, capacity).squeeze(1)
    ends = (begin + room)[:own].clamp(max=capacity).int()
    return Received(dispatch_again(x, sources, routing, group), weights, ends, (sources == -2).sum().int().view(1), sources)


def dispatch_again(x: torch.Tensor, sources: torch.Tensor, routing: Routing, group: str) -> torch.Tensor:
    """Does the same as its method ``again``; rows that nobody sends are zero."""
    tokens = _of_all(x, routing, group, 0).flatten(0, 1)
    return _placed(tokens, sources, routing.capacity)


def dispatch_fp8(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, routing: Routing, group: str) -> Received:
    """Does the same as the kernel with ``fp8``; rows that nobody sends are zero."""
    sent = quantise_parts(x, SCALE_COLUMNS)
    received = dispatch(sent.values.view(torch.uint8), topk_idx, topk_weights, routing, group)
    return received._replace(x=received.x.view(FP8), scales=dispatch_again(sent.scales, received.sources, routing, group))


def combine(
    x: torch.Tensor,
    sources: torch.Tensor,
    topk_idx: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor | None,
    scalars: torch.Tensor | None,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Does the same as :class:`peerlane.device.moe.dispatch.TokenCombine`, but sums are rounded once."""
    ranks, most, k = sources.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    token = torch.full((routing.capacity + 1,), ranks * most, device=x.device)
    token[_targets(sources, routing.capacity)] = torch.arange(ranks * most, device=x.device).repeat_interleave(k)
    values = x.to(wide) if weights is None else x.to(wide) * weights.to(wide).unsqueeze(1)
    sums = values.new_zeros((ranks * most + 1, x.shape[1])).index_add_(0, token[: routing.capacity], values)
    y = _sent_home(sums[: ranks * most], ranks, group)[: topk_idx.shape[0]].to(x.dtype)
    if scalars is None:
        return y, None
    kept = torch.where(sources >= 0, scalars[sources.clamp(min=0).long()], 0)
    return y, _sent_home(kept.flatten(0, 1), ranks, group)[: topk_idx.shape[0]]


def _of_all(x: torch.Tensor, routing: Routing, group: str, rest: int) -> torch.Tensor:
    """Returns all ranks' tensors (W, num_max_tokens, ...), filled up with ``rest``."""
    own = x.new_full((routing.num_max_tokens, *x.shape[1:]), rest)
    own[: x.shape[0]] = x
    return gathered(own, group).view(-1, *own.shape)


def _targets(sources: torch.Tensor, capacity: int) -> torch.Tensor:
    """Returns each slot's row, ``capacity`` for those that have none."""
    return torch.where(sources >= 0, sources, capacity).flatten().long()


def _placed(values: torch.Tensor, sources: torch.Tensor, capacity: int) -> torch.Tensor:
    """Returns (capacity, ...) of zeros and values, which are those of all slots or of all tokens."""
    slots = torch.arange(sources.numel(), device=values.device) // (sources.numel() // max(1, values.shape[0]) or 1)
    placed = values.new_zeros((capacity + 1, *values.shape[1:]))
    placed[_targets(sources, capacity)] = values[slots]
    return placed[:capacity]


def _sent_home(sums: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Returns the sum over ranks of what each has of this rank's tokens, of (W num_max_tokens, ...)."""
    received = torch.empty_like(sums)
    transport(sums, group).all_to_all_single(received, sums.contiguous())
    return received.view(ranks, -1, *sums.shape[1:]).sum(0)
