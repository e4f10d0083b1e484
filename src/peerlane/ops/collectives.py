"""Collectives as operators, with gradients: behind ``ops.all_reduce``, ``ops.all_gather``, ``ops.reduce_scatter`` and ``ops.all_to_all``.

Each operator takes and gives contiguous tensors and works along axis 0. A result is a tensor of its own, which no later call writes.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from peerlane.device.collectives.reductions import OPERATIONS, Reduction, reduction_of
from peerlane.errors import UsageError
from peerlane.ops import replicated
from peerlane.ops.check import same_call
from peerlane.ops.direct import operator
from peerlane.ops.groups import GroupLike, group_name, world_size
from peerlane.ops.shapes import require_axis, require_dense, rows
from peerlane.ops.sharding import takes_dtensors
from peerlane.ops.transport import gathered, scattered, summed, transport

Gradient = Literal["summed", "replicated"]
"""Whose loss gradients are of: the sum of all ranks' losses, or one loss that all ranks compute alike from a result that all have."""
ReduceOp = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""``"sum"``, ``"avg"``, ``"max"``, ``"min"``, or torch's operation."""


def replicates(gradient: Gradient) -> bool:
    """Tells whether gradients are those of one loss. Raises UsageError for another word."""
    if gradient not in ("summed", "replicated"):
        raise UsageError(f"gradient={gradient!r}: expected 'summed' or 'replicated'")
    return gradient == "replicated"


# --- operators ---


@operator("all_reduce")
def _all_reduce(x: torch.Tensor, group: str, op: str = "sum", factor: float = 1.0) -> torch.Tensor:
    same_call(f"all_reduce {op}", group, x)
    return summed(x, group, Reduction(op, factor))


@operator("all_gather")
def _all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    same_call("all_gather", group, x)
    return gathered(x, group)


@operator("reduce_scatter")
def _reduce_scatter(x: torch.Tensor, group: str, op: str = "sum", factor: float = 1.0) -> torch.Tensor:
    same_call(f"reduce_scatter {op}", group, x)
    return scattered(x, group, Reduction(op, factor), "reduce_scatter")


@operator("all_to_all")
def _all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    same_call("all_to_all", group, x)
    x = x.contiguous()
    rows(x, world_size(group), "all_to_all")
    received = torch.empty_like(x)
    transport(x, group).all_to_all_single(received, x)
    return received


@torch.library.custom_op("peerlane::all_reduce_out", mutates_args=("out",))
def _all_reduce_out(out: torch.Tensor, x: torch.Tensor | None, group: str, op: str, factor: float) -> None:
    """Without ``x`` in place."""
    same_call(f"all_reduce {op} to out", group, out)
    x, reduction = out if x is None else x.contiguous(), Reduction(op, factor)
    transport(x, group, reduction).all_reduce(x, out, reduction)


@torch.library.custom_op("peerlane::all_gather_out", mutates_args=("out",))
def _all_gather_out(out: torch.Tensor, x: torch.Tensor, group: str) -> None:
    same_call("all_gather to out", group, x)
    transport(x, group).all_gather_into_tensor(out, x.contiguous())


@torch.library.custom_op("peerlane::reduce_scatter_out", mutates_args=("out",))
def _reduce_scatter_out(out: torch.Tensor, x: torch.Tensor, group: str, op: str, factor: float) -> None:
    same_call(f"reduce_scatter {op} to out", group, x)
    reduction = Reduction(op, factor)
    transport(x, group, reduction).reduce_scatter_tensor(out, x.contiguous(), reduction)


_all_reduce.register_fake(lambda x, group, op="sum", factor=1.0: torch.empty_like(x, memory_format=torch.contiguous_format))
_all_to_all.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_all_gather.register_fake(lambda x, group: x.new_empty((world_size(group) * x.shape[0], *x.shape[1:])))
_reduce_scatter.register_fake(
    lambda x, group, op="sum", factor=1.0: x.new_empty((rows(x, world_size(group), "reduce_scatter"), *x.shape[1:]))
)


# --- gradients ---


def _remember_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _remember_reduction(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.op, ctx.factor = inputs


def _all_reduce_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    replicated.require_gradient(ctx.op)
    return _all_reduce(grad, ctx.group, ctx.op, ctx.factor), None, None, None


def _reduce_scatter_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return replicated.scaled(_all_gather(grad, ctx.group), ctx.op, ctx.factor, ctx.group), None, None, None


_all_reduce.register_autograd(_all_reduce_gradient, setup_context=_remember_reduction)
_all_gather.register_autograd(lambda ctx, grad: (_reduce_scatter(grad, ctx.group), None), setup_context=_remember_group)
_reduce_scatter.register_autograd(_reduce_scatter_gradient, setup_context=_remember_reduction)
_all_to_all.register_autograd(lambda ctx, grad: (_all_to_all(grad, ctx.group), None), setup_context=_remember_group)


# --- what users call ---


@takes_dtensors
def all_reduce(
    x: torch.Tensor, group: GroupLike = None, *, reduce_op: ReduceOp = "sum", out: torch.Tensor | None = None, gradient: Gradient = "summed"
) -> torch.Tensor:
    """Returns the sum of all ranks' ``x``, or another reduction: ``"avg"``, ``"max"``, ``"min"``, which have no gradient but for "avg".

    ``out``: a contiguous tensor like ``x``, or ``x`` itself, which gets the result; without gradients. ``gradient="replicated"``: the
    backward pass is local, as Megatron's."""
    require_dense(x, "all_reduce")
    name, (op, factor) = group_name(group), _operation(reduce_op)
    if out is not None:
        _require_out(out, x, tuple(x.shape))
        _all_reduce_out(out, None if out is x else x, name, op, factor)
        return out
    call: Callable[..., torch.Tensor] = replicated.AllReduce.apply if replicates(gradient) else _all_reduce
    return call(x, name, op, factor)


@takes_dtensors
def all_gather(
    x: torch.Tensor, group: GroupLike = None, *, axis: int = 0, out: torch.Tensor | None = None, gradient: Gradient = "summed"
) -> torch.Tensor:
    """Returns all ranks' ``x`` along ``axis``, in rank order. ``gradient="replicated"``: the backward pass takes this rank's part.

    ``out``: a contiguous tensor which gets the result; without gradients."""
    require_axis(x, "all_gather")
    name, axis = group_name(group), _axis(x, axis)
    ranks = world_size(name)
    if out is not None:
        _require_out(out, x, (*x.shape[:axis], ranks * x.shape[axis], *x.shape[axis + 1 :]))
        if axis == 0:
            _all_gather_out(out, x, name)
            return out
    call: Callable[..., torch.Tensor] = replicated.AllGather.apply if replicates(gradient) else _all_gather
    whole = call(x, name)
    if axis:
        whole = whole.view(ranks, *x.shape).movedim(0, axis).flatten(axis, axis + 1)
    return whole if out is None else out.copy_(whole)


@takes_dtensors
def reduce_scatter(
    x: torch.Tensor, group: GroupLike = None, *, reduce_op: ReduceOp = "sum", axis: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns this rank's part, of W equal ones along ``axis``, of the sum of all ranks' ``x``, or of a reduction as :func:`all_reduce`'s.

    ``out``: a contiguous tensor which gets the result; without gradients."""
    require_axis(x, "reduce_scatter")
    name, (op, factor), axis = group_name(group), _operation(reduce_op), _axis(x, axis)
    ranks = world_size(name)
    length = rows(x if axis == 0 else x.movedim(axis, 0), ranks, "reduce_scatter")
    if axis:
        x = x.reshape(*x.shape[:axis], ranks, length, *x.shape[axis + 1 :]).movedim(axis, 0).flatten(0, 1)
    if out is not None:
        _require_out(out, x, (x.shape[0] // ranks, *x.shape[1:]))
        _reduce_scatter_out(out, x, name, op, factor)
        return out
    return _reduce_scatter(x, name, op, factor)


@takes_dtensors
def all_to_all(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Returns to rank r part r, of W equal ones along axis 0, of every rank's ``x``, in rank order."""
    name = group_name(group)
    rows(x, world_size(name), "all_to_all")
    return _all_to_all(x, name)


def replicate(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Returns ``x``, whose gradient is the sum of all ranks' gradients: put it before a column-parallel layer."""
    call: Callable[..., torch.Tensor] = replicated.Replicate.apply
    return call(x, group_name(group))


def _operation(reduce_op: ReduceOp) -> tuple[str, float]:
    reduction = reduction_of(reduce_op)
    if reduction.name not in OPERATIONS:
        raise UsageError(f"reduce_op={reduce_op!r}: expected 'sum', 'avg', 'max' or 'min'")
    return reduction.name, reduction.factor


def _axis(x: torch.Tensor, axis: int) -> int:
    if not -x.dim() <= axis < x.dim():
        raise UsageError(f"axis={axis} of a tensor of shape {tuple(x.shape)}: expected one of its {x.dim()} axes")
    return axis % x.dim()


def _require_out(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise UsageError(
            f"out= is {tuple(out.shape)} in {out.dtype} on {out.device}: expected a contiguous tensor of shape {shape} in {x.dtype} on "
            f"{x.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise UsageError("out= has no gradient, and a tensor of the call requires one: leave out= away, or call under torch.no_grad()")
