"""Collectives, fused matrix products, attention and experts over ranks as PyTorch operators: with gradients, and shapes for torch.compile.

    from peerlane import ops

    hidden = ops.all_gather_gemm(x, w1)               this rank's columns (m, k/W) and (k, n) give (m, n)
    y = ops.gemm_reduce_scatter(hidden.relu(), w2)    (m, n) and (n, k) give (m/W, k): rows of the sum
    y.square().sum().backward()

Gradients are those of the sum of all ranks' losses, as in ``torch.distributed.nn.functional``. The device kit does the work on GPUs and
emulated ranks. CPU ranks use torch.distributed, for tests. ``group`` is a process group, its name or a DeviceMesh; None means all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from peerlane.device.products import gemm
from peerlane.device.products.all_gather_gemm import all_gather_gemm as _fused_gather
from peerlane.device.products.gemm_all_gather import gemm_all_gather as _fused_columns
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce as _fused_sum
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter as _fused_scatter
from peerlane.errors import UsageError
from peerlane.ops import replicated
from peerlane.ops.attention import ring_attention, ulysses_attention
from peerlane.ops.check import same_call
from peerlane.ops.collectives import (
    Gradient,
    _all_gather,
    _all_reduce,
    _reduce_scatter,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    replicate,
)
from peerlane.ops.collectives import replicates as _replicates
from peerlane.ops.experts import gated_experts
from peerlane.ops.groups import GroupLike
from peerlane.ops.groups import group_name as _name
from peerlane.ops.groups import kit_group as _kit
from peerlane.ops.groups import world_size as _world_size
from peerlane.ops.memory import close, memory_report, prepare
from peerlane.ops.norms import all_reduce_rms_norm, all_reduce_rms_norm_fp8
from peerlane.ops.products import Behind as _Behind
from peerlane.ops.products import gemm_all_reduce as _finished_sum
from peerlane.ops.products import gemm_reduce_scatter as _finished_scatter
from peerlane.ops.products import right_gradient as _right_gradient
from peerlane.ops.products import row_gather_gemm
from peerlane.ops.shapes import product as _product
from peerlane.ops.shapes import rows
from peerlane.ops.sharding import takes_dtensors

__all__ = [
    "all_gather",
    "all_gather_gemm",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_fp8",
    "all_to_all",
    "close",
    "gated_experts",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "memory_report",
    "prepare",
    "reduce_scatter",
    "replicate",
    "ring_attention",
    "row_gather_gemm",
    "ulysses_attention",
]


# --- fused products ---


def _scatter_columns(columns: torch.Tensor, width: int, group: str) -> torch.Tensor:
    """Returns this rank's columns of the sum."""
    parts = columns.reshape(columns.shape[0], _world_size(group), width).transpose(0, 1)
    own: torch.Tensor = _reduce_scatter(parts.flatten(0, 1), group)
    return own


def _gather_columns(a: torch.Tensor, group: str) -> torch.Tensor:
    """Returns every rank's columns side by side."""
    shards: torch.Tensor = _all_gather(a, group).view(_world_size(group), *a.shape)
    return shards.transpose(0, 1).flatten(1, 2)


@torch.library.custom_op("peerlane::all_gather_gemm", mutates_args=())
def _all_gather_gemm(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    same_call("all_gather_gemm", group, a, b)
    kit = _kit(a, group)
    if kit is None or a.dtype not in gemm.ELEMENT_TYPES or not (a.numel() and b.numel()):
        gathered: torch.Tensor = _gather_columns(a, group) @ b
        return gathered
    multiply = _fused_gather(kit, a.shape[0], a.shape[1], a.dtype, n=b.shape[1])
    product: torch.Tensor = multiply(gemm.aligned(a), b).contiguous()
    return product


@torch.library.custom_op("peerlane::gemm_reduce_scatter", mutates_args=())
def _gemm_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    same_call("gemm_reduce_scatter", group, a, b)
    kit = _kit(a, group)
    if kit is None or a.dtype not in gemm.ELEMENT_TYPES or not (a.numel() and b.numel()):
        own: torch.Tensor = _reduce_scatter(a @ b, group)
        return own
    multiply = _fused_scatter(kit, a.shape[0], b.shape[1], a.dtype)
    product: torch.Tensor = multiply(gemm.aligned(a), b).contiguous()
    return product


@torch.library.custom_op("peerlane::gemm_all_reduce", mutates_args=())
def _gemm_all_reduce(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    same_call("gemm_all_reduce", group, a, b)
    kit = _kit(a, group)
    if kit is None or a.dtype not in gemm.ELEMENT_TYPES or not (a.numel() and b.numel()):
        total: torch.Tensor = _all_reduce(a @ b, group)
        return total
    multiply = _fused_sum(kit, a.shape[0], b.shape[1], a.dtype)
    return multiply(gemm.aligned(a), b).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("peerlane::gemm_all_gather", mutates_args=())
def _gemm_all_gather(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    same_call("gemm_all_gather", group, a, b)
    kit = _kit(a, group)
    if kit is None or a.dtype not in gemm.ELEMENT_TYPES or not (a.numel() and b.numel()):
        return _gather_columns(a @ b, group)
    multiply = _fused_columns(kit, a.shape[0], b.shape[1], a.dtype)
    return multiply(gemm.aligned(a), b).clone(memory_format=torch.contiguous_format)


# --- shapes ---


for _whole in (_all_gather_gemm, _gemm_all_reduce):
    _whole.register_fake(lambda a, b, group: a.new_empty((a.shape[0], b.shape[1])))
_gemm_reduce_scatter.register_fake(lambda a, b, group: a.new_empty((rows(a, _world_size(group), "gemm_reduce_scatter"), b.shape[1])))
_gemm_all_gather.register_fake(lambda a, b, group: a.new_empty((a.shape[0], _world_size(group) * b.shape[1])))


# --- gradients ---


def _remember_product(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.group = inputs
    ctx.save_for_backward(a, b)


def _gather_gemm_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    a, b = ctx.saved_tensors
    return _scatter_columns(grad @ b.T, a.shape[1], ctx.group), _gather_columns(a, ctx.group).T @ grad, None


def _scattered_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    a, b = ctx.saved_tensors
    da, whole = torch.ops.peerlane.row_gather_gemm(grad, [b.T], [], "none", 1.0, True, ctx.group)
    return da, _right_gradient(a, whole, b, 1.0), None


def _product_gradients(own: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor, None]]:
    """Returns the gradients of a product's operands. ``own``: the gradient of this rank's product, from that of the result."""

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (a, b), whole = ctx.saved_tensors, own(ctx, grad)
        return whole @ b.T, a.T @ whole, None

    return gradients


_of_sum = _product_gradients(lambda ctx, grad: _all_reduce(grad, ctx.group))
_of_columns = _product_gradients(lambda ctx, grad: _scatter_columns(grad, ctx.saved_tensors[1].shape[1], ctx.group))
_all_gather_gemm.register_autograd(_gather_gemm_gradients, setup_context=_remember_product)
_gemm_reduce_scatter.register_autograd(_scattered_gradients, setup_context=_remember_product)
_gemm_all_reduce.register_autograd(_of_sum, setup_context=_remember_product)
_gemm_all_gather.register_autograd(_of_columns, setup_context=_remember_product)


# --- what users call ---


@takes_dtensors
def all_gather_gemm(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Returns ``cat(all ranks' a, dim=-1) @ b``: (..., k/W) and (k, n) give (..., n). bfloat16 and float16 run as one kernel."""
    name = _name(group)
    return _product(partial(_all_gather_gemm, group=name), "all_gather_gemm", a, b, depth=_world_size(name))


@takes_dtensors
def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    activation: gemm.Activation = "none",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's part, along axis 0, of the summed ``a @ b``: (m, ..., k) and (k, n) give (m/W, ..., n). bfloat16 and float16 run
    as one kernel, which finishes a sum as ``activation(scale * sum + bias) + residual``: bias (n), residual of the result's shape."""
    name, behind = _name(group), _Behind(bias, activation, residual, scale)
    call = partial(_gemm_reduce_scatter, group=name) if behind.nothing else partial(_finished_scatter, behind=behind, group=name)
    return _product(call, "gemm_reduce_scatter", a, b, parts=_world_size(name))


@takes_dtensors
def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: GroupLike = None,
    *,
    gradient: Gradient = "summed",
    bias: torch.Tensor | None = None,
    activation: gemm.Activation = "none",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns the sum of all ranks' ``a @ b``. a (..., k), b (k, n); (..., n). ``gradient="replicated"``: the backward pass is local.

    The kernel finishes a sum as ``activation(scale * sum + bias) + residual``: bias (n), residual of the result's shape, the same on all
    ranks; with ``gradient="summed"`` alone."""
    name, behind = _name(group), _Behind(bias, activation, residual, scale)
    if not behind.nothing:
        if _replicates(gradient):
            raise UsageError(
                "gemm_all_reduce with a bias, activation, residual or scale: expected gradient='summed'; use nn.RowParallelLinear"
            )
        return _product(partial(_finished_sum, behind=behind, group=name), "gemm_all_reduce", a, b)
    multiply: Any = replicated.GemmAllReduce.apply if _replicates(gradient) else _gemm_all_reduce

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = multiply(a, b, name)
        return total

    return _product(call, "gemm_all_reduce", a, b)


@takes_dtensors
def gemm_all_gather(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *, gradient: Gradient = "summed") -> torch.Tensor:
    """Returns all ranks' ``a @ b`` side by side. a (..., k), b (k, n); (..., W n). ``gradient``: as :func:`gemm_all_reduce`."""
    name = _name(group)
    multiply: Any = replicated.GemmAllGather.apply if _replicates(gradient) else _gemm_all_gather

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = multiply(a, b, name)
        return whole

    return _product(call, "gemm_all_gather", a, b)
