"""Tokens to the ranks of their experts and back, with gradients: ``ops.dispatch`` and ``ops.combine``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from peerlane.device import Group
from peerlane.device.moe import dispatch as kernels
from peerlane.device.moe.dispatch import Routing, token_combine, token_dispatch
from peerlane.errors import UsageError
from peerlane.ops import gathered_dispatch
from peerlane.ops.check import no_kernel, same_call
from peerlane.ops.direct import operator
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size

Kernel = TypeVar("Kernel")
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DispatchConfig:
    """The sizes of a dispatch, the same on all ranks."""

    num_experts: int
    """The experts of all ranks, a multiple of the number of ranks."""
    num_max_tokens_per_rank: int
    """the most tokens that any rank gives"""
    capacity: int | None = None
    """the most rows that a rank takes; what is above it is dropped. None: room for all, if experts of a token differ"""
    expert_alignment: int = 1
    """rows of each expert begin at a multiple of it; zeros fill up"""
    num_sms: int | None = None
    """SMs that dispatch and combine may take, so that others run beside them; None: all, which takes least time alone"""

    def sizes(self, ranks: int, slots: int) -> tuple[int, ...]:
        """Returns those of :class:`Routing`. Raises UsageError for impossible ones."""
        own, alignment = self.num_experts // ranks, self.expert_alignment
        capacity = self.capacity
        if min(own, alignment, self.num_max_tokens_per_rank, slots) > 0 and capacity is None:
            room = ranks * self.num_max_tokens_per_rank * min(slots, own) + own * (alignment - 1)
            capacity = -(-room // alignment) * alignment
        if capacity is None or self.num_experts != own * ranks or capacity < 1 or capacity % alignment or (self.num_sms or 1) < 1:
            raise UsageError(
                f"{self} on {ranks} ranks with {slots} slots: expected a multiple of {ranks} experts, 1 token, slot and SM or more, and a "
                "capacity of 1 row or more, a multiple of expert_alignment"
            )
        return own, self.num_max_tokens_per_rank, capacity, alignment, self.num_sms or 0


class DispatchHandle(NamedTuple):
    """The routes of a dispatch: what ``combine`` needs, and another dispatch with the same routes. All tensors are on the device."""

    ends: torch.Tensor
    """(own experts), int32: expert e of this rank has rows [ends[e - 1], ends[e]) of what was received; the offsets of grouped products"""
    dropped: torch.Tensor
    """(1), int32: rows for this rank's experts that its capacity had no room for"""
    topk_idx: torch.Tensor
    """(..., k), int64: the experts of this rank's tokens"""
    sources: torch.Tensor
    """(W, tokens of a rank at most, k), int32: the row of each rank's slots here; -1 for others' experts, -2 for dropped ones"""
    sizes: tuple[int, ...]
    """those of :class:`Routing`"""
    group: str


# --- operators ---


def _kernel(make: Callable[..., Kernel], x: torch.Tensor, slots: int, sizes: Sequence[int], group: str) -> Kernel | None:
    """Returns the kit's kernel for rows like those of x; None where there is none."""
    own, most, *_ = sizes
    row_bytes = x.shape[1] * x.itemsize
    fits = (
        x.dtype in kernels.DTYPES
        and row_bytes % 16 == 0
        and 1 <= slots <= kernels.MAX_SLOTS
        and own * world_size(group) <= kernels.MAX_EXPERTS
        and most <= kernels.MAX_TOKENS
    )
    kit: Group | None = kit_group(x, group) if fits and row_bytes else None
    return None if kit is None else make(kit, most, slots, own, row_bytes)


@operator("dispatch")
def _dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, sizes: Sequence[int], group: str) -> Five:
    """Returns received rows, their weights (or none), ends, dropped, sources."""
    same_call(f"dispatch {list(sizes)}", group, x[:0], topk_idx[:0])
    routing, send = Routing(*sizes), _kernel(token_dispatch, x, topk_idx.shape[1], sizes, group)
    x, topk_idx = x.contiguous(), topk_idx.contiguous()
    if send is None:
        received = gathered_dispatch.dispatch(x, topk_idx, topk_weights, routing, group)
    else:
        received = send(x, topk_idx, None if topk_weights is None else topk_weights.float().contiguous(), routing)
    weights = x.new_empty(0) if topk_weights is None or received.weights is None else received.weights.to(topk_weights.dtype)
    return received.x, weights, received.ends, received.dropped, received.sources


@operator("dispatch_fp8")
def _dispatch_fp8(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, sizes: Sequence[int], group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns received rows in e4m3, their weights (or none), ends, dropped, sources, and the rows' scales."""
    same_call(f"dispatch_fp8 {list(sizes)}", group, x[:0], topk_idx[:0])
    has_kernel = x.dtype in kernels.FP8_DTYPES
    routing, send = Routing(*sizes), _kernel(token_dispatch, x, topk_idx.shape[1], sizes, group) if has_kernel else None
    given = x.contiguous(), topk_idx.contiguous(), None if topk_weights is None else topk_weights.float().contiguous()
    received = gathered_dispatch.dispatch_fp8(*given, routing, group) if send is None else send(*given, routing, fp8=True)
    weights = x.new_empty(0) if topk_weights is None or received.weights is None else received.weights.to(topk_weights.dtype)
    assert received.scales is not None
    return received.x, weights, received.ends, received.dropped, received.sources, received.scales


@operator("dispatch_again")
def _dispatch_again(x: torch.Tensor, topk_idx: torch.Tensor, sources: torch.Tensor, sizes: Sequence[int], group: str) -> torch.Tensor:
    """Returns rows of x where another dispatch has put its rows."""
    same_call(f"dispatch {list(sizes)} again", group, x[:0], topk_idx[:0])
    routing, send = Routing(*sizes), _kernel(token_dispatch, x, topk_idx.shape[1], sizes, group)
    if send is None:
        return gathered_dispatch.dispatch_again(x.contiguous(), sources, routing, group)
    return send.again(x.contiguous(), sources, routing)


@operator("combine")
def _combine(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    scalars: torch.Tensor | None,
    topk_idx: torch.Tensor,
    sources: torch.Tensor,
    sizes: Sequence[int],
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens' sums of rows, each times its weight; and what ``scalars`` has for their slots, or nothing."""
    same_call(f"combine {list(sizes)}", group, x[:0], topk_idx[:0])
    routing, add = Routing(*sizes), _kernel(token_combine, x, topk_idx.shape[1], sizes, group)
    factors = None if weights is None else weights.contiguous()
    told = None if scalars is None else scalars.contiguous()
    if add is None:
        no_kernel("combine", group, x, topk_idx)
        y, found = gathered_dispatch.combine(x.contiguous(), sources, topk_idx, routing, factors, told, group)
    else:
        factors, of_rows = (None if value is None else value.float() for value in (factors, told))
        y, found = add(x.contiguous(), sources, topk_idx.contiguous(), routing, factors, of_rows)
    return y, x.new_empty(0) if scalars is None or found is None else found.to(scalars.dtype)


# --- shapes ---


@_dispatch.register_fake
def _like_dispatched(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, sizes: Sequence[int], group: str) -> Five:
    own, most, capacity, *_ = sizes
    weights = x.new_empty(0) if topk_weights is None else topk_weights.new_empty(capacity)
    ends, dropped = (topk_idx.new_empty(size, dtype=torch.int32) for size in (own, 1))
    sources = topk_idx.new_empty((world_size(group), most, topk_idx.shape[1]), dtype=torch.int32)
    return x.new_empty((capacity, x.shape[1])), weights, ends, dropped, sources


@_dispatch_fp8.register_fake
def _(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, sizes: Sequence[int], group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, *rest = _like_dispatched(x, topk_idx, topk_weights, sizes, group)
    scales = rest[1].new_empty((rows.shape[0], x.shape[1] // kernels.SCALE_COLUMNS), dtype=torch.float32)
    weights, ends, dropped, sources = rest
    return torch.empty_like(rows, dtype=kernels.FP8), weights, ends, dropped, sources, scales


_dispatch_again.register_fake(lambda x, topk_idx, sources, sizes, group: x.new_empty((sizes[2], x.shape[1])))
_combine.register_fake(
    lambda x, weights, scalars, topk_idx, sources, sizes, group: (
        x.new_empty((topk_idx.shape[0], x.shape[1])),
        x.new_empty(0) if scalars is None else scalars.new_empty(topk_idx.shape),
    )
)


# --- gradients: a combine is that of a dispatch, and a dispatch that of a combine ---


def _remember_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Five) -> None:
    x, topk_idx, topk_weights, ctx.sizes, ctx.group = inputs
    ctx.like = x.shape[1], x.dtype, None if topk_weights is None else topk_weights.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(topk_idx, output[4])


def _dispatch_gradients(ctx: Any, d_rows: torch.Tensor | None, d_weights: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    (topk_idx, sources), (width, dtype, of_weights) = ctx.saved_tensors, ctx.like
    if d_rows is None:
        d_rows = torch.zeros((ctx.sizes[2], width), dtype=dtype, device=sources.device)
    scalars = None if of_weights is None else d_weights
    dx, of_slots = torch.ops.peerlane.combine(d_rows, None, scalars, topk_idx, sources, ctx.sizes, ctx.group)
    return dx, None, None if scalars is None else of_slots, None, None


def _remember_again(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *kept, ctx.sizes, ctx.group = inputs
    ctx.save_for_backward(*kept)


def _again_gradients(ctx: Any, d_rows: torch.Tensor) -> tuple[Any, ...]:
    dx, _ = torch.ops.peerlane.combine(d_rows, None, None, *ctx.saved_tensors, ctx.sizes, ctx.group)
    return dx, None, None, None, None


def _remember_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weights, _, *kept, ctx.sizes, ctx.group = inputs
    ctx.is_weighted = weights is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*kept, *([x, weights] if ctx.is_weighted else []))


def _combine_gradients(ctx: Any, dy: torch.Tensor | None, d_scalars: torch.Tensor | None) -> tuple[Any, ...]:
    if d_scalars is not None and ctx.needs_input_grad[2]:
        raise UsageError("a second gradient of the weights of ops.dispatch: expected first gradients alone")
    if dy is None:
        return (None,) * 7
    topk_idx, sources, *rest = ctx.saved_tensors
    d_rows = torch.ops.peerlane.dispatch_again(dy, topk_idx, sources, ctx.sizes, ctx.group)
    d_weights = None
    if ctx.is_weighted:
        x, weights = rest
        wide = torch.promote_types(x.dtype, torch.float32)
        d_weights = (d_rows.to(wide) * x.to(wide)).sum(-1).to(weights.dtype)
        d_rows = (d_rows.to(wide) * weights.to(wide).unsqueeze(1)).to(x.dtype)
    return d_rows, d_weights, None, None, None, None, None


_dispatch.register_autograd(_dispatch_gradients, setup_context=_remember_dispatch)
_dispatch_again.register_autograd(_again_gradients, setup_context=_remember_again)
_combine.register_autograd(_combine_gradients, setup_context=_remember_combine)


# --- what users call ---


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    config: DispatchConfig | None = None,
    *,
    handle: DispatchHandle | None = None,
    group: GroupLike = None,
) -> tuple[torch.Tensor, torch.Tensor | None, DispatchHandle]:
    """Returns the rows that come to this rank's experts (capacity, H), their weights (capacity) or None, and a handle.

    x (..., H); topk_idx (..., k) int64, -1 for no expert; topk_weights (..., k) or None. Rank r holds experts r E to r E + E - 1. Rows lie
    by expert, then source rank, then token, as ``handle.ends`` says. Those behind the last end are undefined. No count leaves the device.
    With ``handle`` alone, x (..., H) takes the routes of another dispatch; rows that it does not name are undefined."""
    if handle is not None:
        if topk_idx is not None or topk_weights is not None or config is not None or group is not None:
            raise UsageError("dispatch got a handle and other routes: expected x and handle alone; the handle knows its sizes and group")
        _require_tokens("dispatch", x, handle.topk_idx)
        kept = handle.topk_idx.flatten(0, -2), handle.sources, handle.sizes, handle.group
        return _dispatch_again(x.flatten(0, -2), *kept), None, handle
    if topk_idx is None or config is None:
        raise UsageError("dispatch got no topk_idx or no config: expected both, or the handle of another dispatch")
    rows_of, name = _routed("dispatch", x, topk_idx, topk_weights, config, group), group_name(group)
    rows, weights, ends, dropped, sources = _dispatch(*rows_of, name)
    return rows, None if topk_weights is None else weights, DispatchHandle(ends, dropped, topk_idx, sources, rows_of[3], name)


def dispatch_fp8(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, config: DispatchConfig, *, group: GroupLike = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, DispatchHandle]:
    """Returns rows as :func:`dispatch` does, in float8_e4m3fn, and their scales (capacity, H / 128), float32; their weights; a handle.

    Each 128 columns of a row, times their scale, are the token's; its largest value becomes 448. Tokens are quantised in the kernel.
    H is a multiple of 128. There is no gradient."""
    if x.shape[-1] % kernels.SCALE_COLUMNS or not x.is_floating_point():
        raise UsageError(f"dispatch_fp8 got x {tuple(x.shape)} in {x.dtype}: expected H to be a multiple of 128, in a floating-point dtype")
    rows_of, name = _routed("dispatch_fp8", x, topk_idx, topk_weights, config, group), group_name(group)
    rows, weights, ends, dropped, sources, scales = _dispatch_fp8(*rows_of, name)
    handle = DispatchHandle(ends, dropped, topk_idx, sources, rows_of[3], name)
    return rows, scales, None if topk_weights is None else weights, handle


def combine(x: torch.Tensor, handle: DispatchHandle, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Returns for every token of a dispatch the sum of its rows, each times its weight: (..., H).

    x (capacity, H): rows as ``dispatch`` delivers them; H may be another one. weights (capacity), floating-point, or None: ones. A rank's
    rows of a token are added in float32 and rounded; so are all ranks' sums, in rank order. Dropped rows count as zeros."""
    capacity = handle.sizes[2]
    if x.dim() != 2 or x.shape[0] != capacity or not x.is_floating_point():
        raise UsageError(
            f"combine got rows {tuple(x.shape)} in {x.dtype}: expected ({capacity}, H), floating-point, as dispatch delivers them"
        )
    if weights is not None and (tuple(weights.shape) != (capacity,) or not weights.is_floating_point()):
        raise UsageError(f"combine got weights {tuple(weights.shape)} in {weights.dtype}: expected ({capacity},), floating-point")
    y: torch.Tensor
    y, _ = _combine(x, weights, None, handle.topk_idx.flatten(0, -2), handle.sources, handle.sizes, handle.group)
    return y.view(*handle.topk_idx.shape[:-1], x.shape[1])


def _routed(
    name: str, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, config: DispatchConfig, group: GroupLike
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """Returns x, topk_idx and topk_weights of one axis of tokens, and the sizes. Raises UsageError unless they fit together."""
    _require_tokens(name, x, topk_idx)
    if topk_weights is not None and (topk_weights.shape != topk_idx.shape or not topk_weights.is_floating_point()):
        raise UsageError(
            f"{name} got topk_weights {tuple(topk_weights.shape)} in {topk_weights.dtype}: expected {tuple(topk_idx.shape)} and "
            "a floating-point dtype"
        )
    sizes, flat = config.sizes(world_size(group_name(group)), topk_idx.shape[-1]), topk_idx.flatten(0, -2)
    if flat.shape[0] > config.num_max_tokens_per_rank:
        raise UsageError(f"{name} got {flat.shape[0]} tokens: expected at most num_max_tokens_per_rank={config.num_max_tokens_per_rank}")
    return x.flatten(0, -2), flat, None if topk_weights is None else topk_weights.flatten(0, -2), sizes


def _require_tokens(name: str, x: torch.Tensor, topk_idx: torch.Tensor) -> None:
    if x.dim() < 2 or topk_idx.dim() != x.dim() or topk_idx.shape[:-1] != x.shape[:-1] or topk_idx.dtype != torch.int64:
        raise UsageError(
            f"{name} got x {tuple(x.shape)} and topk_idx {tuple(topk_idx.shape)} in {topk_idx.dtype}: expected (T, H) and (T, k) in "
            "torch.int64; T may be several axes"
        )
