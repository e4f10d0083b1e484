"""Attention over a sequence that is sharded across ranks, with gradients: the operators behind ``ops.ring_attention`` and
``ops.ulysses_attention``."""

from typing import Any

import torch
from torch.nn.functional import pad

from peerlane.device import Group
from peerlane.device.attention.forward import supports
from peerlane.device.attention.ring import attend_over_ranks
from peerlane.device.attention.ring_backward import attend_over_ranks_backward
from peerlane.device.attention.ulysses import attend_by_heads, attend_by_heads_backward
from peerlane.errors import UsageError
from peerlane.ops import dense_attention
from peerlane.ops.check import no_kernel, same_call
from peerlane.ops.direct import operator
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size
from peerlane.ops.shapes import cast, without_autocast
from peerlane.ops.sharding import takes_dtensors

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@operator("ring_attention")
def _ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    same_call("ring_attention", group, q, k, v)
    no_kernel("ring_attention", group, q, k, v)
    kit = kit_group(q, group)
    with without_autocast(q):
        if kit is None:
            return dense_attention.attend(q, k, v, scale, causal, group)
        out, logarithms = attend_over_ranks(q, k, v, scale=scale, causal=causal, group=kit)
    return out.clone(memory_format=torch.contiguous_format), logarithms.clone()


@operator("ring_attention_backward")
def _ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    scale: float,
    causal: bool,
    group: str,
) -> Tensors:
    kit = kit_group(q, group)
    with without_autocast(q):
        if kit is None:
            return _contiguous(dense_attention.attend_backward(dout, q, k, v, scale, causal, group))
        known = dout, q, k, v, out, logarithms
        if supports(q, k, v) or q.shape == k.shape == v.shape:
            return _contiguous(attend_over_ranks_backward(*known, scale=scale, causal=causal, group=kit))
        return _backward_of_one_shape(known, scale, causal, kit)


def _backward_of_one_shape(known: tuple[torch.Tensor, ...], scale: float, causal: bool, kit: Group) -> Tensors:
    """Returns the gradients where the kit's other path wants one shape: key heads are repeated, depths padded with zeros, which changes no
    score."""
    dout, q, k, v, out, logarithms = known
    shared, depth = q.shape[2] // k.shape[2], max(q.shape[3], v.shape[3])
    dout, query, key, value, result = (pad(tensor, (0, depth - tensor.shape[3])) for tensor in (dout, q, k, v, out))
    key, value = (tensor.repeat_interleave(shared, 2) for tensor in (key, value))
    dq, dk, dv = attend_over_ranks_backward(dout, query, key, value, result, logarithms, scale=scale, causal=causal, group=kit)
    dk, dv = (gradient.unflatten(2, (-1, shared)).sum(3) for gradient in (dk, dv))  # type: ignore[no-untyped-call]
    return _contiguous((dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]))


@operator("ulysses_attention")
def _ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, group: str) -> torch.Tensor:
    same_call("ulysses_attention", group, q, k, v)
    no_kernel("ulysses_attention", group, q, k, v)
    kit = kit_group(q, group)
    with without_autocast(q):
        if kit is None:
            return dense_attention.attend(q, k, v, scale, causal, group)[0]
        return attend_by_heads(q, k, v, scale=scale, causal=causal, group=kit).clone(memory_format=torch.contiguous_format)


@operator("ulysses_attention_backward")
def _ulysses_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, group: str
) -> Tensors:
    kit = kit_group(q, group)
    with without_autocast(q):
        if kit is None:
            return _contiguous(dense_attention.attend_backward(dout, q, k, v, scale, causal, group))
        return _contiguous(attend_by_heads_backward(dout, q, k, v, scale=scale, causal=causal, group=kit))


def _contiguous(gradients: Tensors) -> Tensors:
    dq, dk, dv = (gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients)
    return dq, dk, dv


def _like(*tensors: torch.Tensor) -> Tensors:
    first, second, third = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)
    return first, second, third


def _result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


_ring.register_fake(
    lambda q, k, v, scale, causal, group: (_result(q, v), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))
)
_ulysses.register_fake(lambda q, k, v, scale, causal, group: _result(q, v))
_ring_backward.register_fake(lambda dout, q, k, v, out, logarithms, scale, causal, group: _like(q, k, v))
_ulysses_backward.register_fake(lambda dout, q, k, v, scale, causal, group: _like(q, k, v))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *(output if isinstance(output, tuple) else ()))
    ctx.settings = inputs[3:]


for _forward, _backward in ((_ring, _ring_backward), (_ulysses, _ulysses_backward)):
    _forward.register_autograd(
        lambda ctx, grad, *_, backward=_backward: (*backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None),
        setup_context=_remember,
    )


def _require_heads(name: str, tensors: Tensors, ranks: int, *, one_shape: bool) -> None:
    """Raises UsageError for head counts that do not match; alike on every device, so that a program tested on CPU ranks runs on GPUs."""
    q, k, v = shapes = [tuple(tensor.shape) for tensor in tensors]
    given = f"{name} got q {q}, k {k} and v {v}"
    if any(len(shape) != 4 for shape in shapes):
        raise UsageError(f"{given}: expected (batch, tokens, heads, depth) each")
    if one_shape and (not q == k == v or q[2] % ranks):
        raise UsageError(f"{given} on {ranks} ranks: expected one shape, with heads that the ranks divide; repeat shared key heads")
    if q[:2] != k[:2] or k[:3] != v[:3] or q[3] != k[3] or q[2] % max(k[2], 1):
        raise UsageError(f"{given}: expected one batch and length, one depth of q and k, and heads of q a multiple of k's")
    if len(dtypes := {tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        raise UsageError(f"{given} in {sorted(map(str, dtypes))}: expected one floating-point dtype; convert the tensors")


@takes_dtensors
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, causal: bool = False, group: GroupLike = None
) -> torch.Tensor:
    """Returns attention of this rank's queries to all ranks' keys, of shards q (B, S, h, D), k (B, S, h_kv, D), v (B, S, h_kv, D_v) in rank
    order: (B, S, h, D_v). ``causal`` counts in the whole sequence."""
    name, (q, k, v) = group_name(group), cast(q, k, v)
    _require_heads("ring_attention", (q, k, v), world_size(name), one_shape=False)
    return _ring(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, causal, name)[0]


@takes_dtensors
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, causal: bool = False, group: GroupLike = None
) -> torch.Tensor:
    """Returns the result of :func:`ring_attention`, where each rank computes its part of the heads for the whole sequence. q, k and v have
    one shape, and the ranks divide h."""
    name, (q, k, v) = group_name(group), cast(q, k, v)
    _require_heads("ulysses_attention", (q, k, v), world_size(name), one_shape=True)
    return _ulysses(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, causal, name)
