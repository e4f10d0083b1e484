"""Gradients of operators whose result is the same on all ranks, where all ranks compute one loss of it: Megatron's convention.

An operator's own gradient is that of the sum of all ranks' losses. If every rank computes the same loss from the same result, that sum
counts the loss W times. Here it counts once: no rank's gradient is added to another's, so the backward pass of the result is local.
"""

from typing import Any

import torch

from peerlane.errors import UsageError
from peerlane.ops.groups import rank, world_size
from peerlane.ops.shapes import right_gradient


class AllReduce(torch.autograd.Function):
    """The reduction over ranks; its gradient is that of the result, of a mean or a scaled sum its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, op: str, factor: float) -> torch.Tensor:
        ctx.reduction = op, factor, group
        total: torch.Tensor = torch.ops.peerlane.all_reduce(x, group, op, factor)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return scaled(grad, *ctx.reduction), None, None, None


class AllGather(torch.autograd.Function):
    """All ranks' parts; the gradient is this rank's part of the result's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        gathered: torch.Tensor = torch.ops.peerlane.all_gather(x, group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        length = grad.shape[0] // world_size(ctx.group)
        return grad.narrow(0, rank(ctx.group) * length, length), None


class GemmAllReduce(torch.autograd.Function):
    """The sum over ranks of ``a @ b``, finished by the operator's ``terms``: bias, residual, activation, scale and group. The gradients are
    those of a product whose gradient is the result's."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, *terms: Any) -> torch.Tensor:
        bias, residual, _, scale, _ = terms
        ctx.save_for_backward(a, b)
        ctx.scale, ctx.has = scale, (bias is not None, residual is not None)
        total: torch.Tensor = torch.ops.peerlane.gemm_all_reduce(a, b, *terms)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (a, b), (has_bias, has_residual) = ctx.saved_tensors, ctx.has
        own = grad * ctx.scale if ctx.scale != 1 else grad
        terms = grad.sum(0) if has_bias else None, grad if has_residual else None
        return own @ b.T, right_gradient(a, own, b), *terms, None, None, None


class GemmAllGather(torch.autograd.Function):
    """All ranks' ``a @ b`` side by side; the gradients are those of this rank's product."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(a, b)
        product: torch.Tensor = torch.ops.peerlane.gemm_all_gather(a, b, group)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, b = ctx.saved_tensors
        own = grad.narrow(1, rank(ctx.group) * b.shape[1], b.shape[1])
        return own @ b.T, right_gradient(a, own, b), None


class ColumnProduct(torch.autograd.Function):
    """``a @ b + bias`` where all ranks have ``a`` and each some columns of the whole ``b``; the gradient of ``a`` is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.save_for_backward(a, b)
        return a @ b if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        da = torch.ops.peerlane.gemm_all_reduce(grad, b.T, None, None, "none", 1.0, ctx.group) if ctx.needs_input_grad[0] else None
        return da, right_gradient(a, grad, b), grad.sum(0) if ctx.has_bias else None, None


class Replicate(torch.autograd.Function):
    """The tensor itself, whose gradient is the sum of all ranks' gradients: what a column-parallel layer does to its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total: torch.Tensor = torch.ops.peerlane.all_reduce(grad, ctx.group)
        return total, None


def scaled(grad: torch.Tensor, op: str, factor: float, group: str) -> torch.Tensor:
    """Returns the gradient of one rank's term, from that of the reduction. Raises UsageError where there is none."""
    require_gradient(op)
    if op == "sum":
        return grad
    return grad * (1 / world_size(group) if op == "avg" else factor)


def require_gradient(op: str) -> None:
    """Raises UsageError for a reduction that has no gradient."""
    if op in ("max", "min"):
        raise UsageError(f"a reduction with {op} has no gradient here; call it on x.detach()")
