"""Collectives, fused matrix products, attention and experts over ranks as PyTorch operators: with gradients, and shapes for torch.compile.

    from peerlane import ops

    hidden = ops.all_gather_gemm(x, w1)               this rank's columns (m, k/W) and (k, n) give (m, n)
    y = ops.gemm_reduce_scatter(hidden.relu(), w2)    (m, n) and (n, k) give (m/W, k): rows of the sum
    y.square().sum().backward()

Gradients are those of the sum of all ranks' losses, as in ``torch.distributed.nn.functional``. The device kit does the work on GPUs and
emulated ranks. CPU ranks use torch.distributed, for tests. ``group`` is a process group; None means all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device import communicator
from peerlane.device.products import gemm
from peerlane.device.products.all_gather_gemm import all_gather_gemm as _fused_gather
from peerlane.device.products.gemm_all_gather import gemm_all_gather as _fused_columns
from peerlane.errors import UsageError
from peerlane.ops.attention import ring_attention, ulysses_attention
from peerlane.ops.experts import gated_experts
from peerlane.ops.groups import group_name as _name
from peerlane.ops.groups import kit_group as _kit
from peerlane.ops.groups import process_group as _process_group
from peerlane.ops.groups import world_size as _world_size
from peerlane.ops.norms import all_reduce_rms_norm, all_reduce_rms_norm_fp8
from peerlane.ops.products import Behind as _Behind
from peerlane.ops.products import gemm_all_reduce as _all_reduced_product
from peerlane.ops.products import gemm_reduce_scatter as _scattered_product
from peerlane.ops.products import row_gather_gemm

__all__ = [
    "all_gather",
    "all_gather_gemm",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_fp8",
    "all_to_all",
    "gated_experts",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "reduce_scatter",
    "ring_attention",
    "row_gather_gemm",
    "ulysses_attention",
]


def _rows(x: torch.Tensor, world_size: int, what: str) -> int:
    if not x.dim() or x.shape[0] % world_size:
        raise UsageError(f"{what} got shape {tuple(x.shape)}: expected rows that {world_size} ranks share equally; pad axis 0")
    return x.shape[0] // world_size


# --- collectives; each operator takes and gives contiguous tensors, and never its own input ---


@torch.library.custom_op("peerlane::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    x, kit = x.contiguous(), _kit(x, group)
    if kit is None:
        total = x.clone()
        dist.all_reduce(total, group=_process_group(group))
        return total
    total = torch.empty_like(x)
    communicator(kit).all_reduce(x, total)
    return total


@torch.library.custom_op("peerlane::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    x, kit, world_size = x.contiguous(), _kit(x, group), _world_size(group)
    whole = x.new_empty((world_size * x.shape[0], *x.shape[1:]))
    if kit is None:
        dist.all_gather_into_tensor(whole, x, group=_process_group(group))
    else:
        communicator(kit).all_gather_into_tensor(whole, x)
    return whole


@torch.library.custom_op("peerlane::reduce_scatter", mutates_args=())
def _reduce_scatter(x: torch.Tensor, group: str) -> torch.Tensor:
    x, kit, world_size = x.contiguous(), _kit(x, group), _world_size(group)
    part = x.new_empty((_rows(x, world_size, "reduce_scatter"), *x.shape[1:]))
    if kit is None:
        dist.reduce_scatter_tensor(part, x, group=_process_group(group))
    else:
        communicator(kit).reduce_scatter_tensor(part, x)
    return part


@torch.library.custom_op("peerlane::all_to_all", mutates_args=())
def _all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    x, kit = x.contiguous(), _kit(x, group)
    _rows(x, _world_size(group), "all_to_all")
    received = torch.empty_like(x)
    if kit is None:
        dist.all_to_all_single(received, x, group=_process_group(group))
    else:
        communicator(kit).all_to_all_single(received, x)
    return received


# --- fused products ---


def _scatter_columns(columns: torch.Tensor, width: int, group: str) -> torch.Tensor:
    """Returns this rank's columns of the sum."""
    parts = columns.reshape(columns.shape[0], -1, width).transpose(0, 1)
    own: torch.Tensor = _reduce_scatter(parts.reshape(-1, width), group)
    return own


def _gather_columns(a: torch.Tensor, group: str) -> torch.Tensor:
    """Returns every rank's columns side by side."""
    shards: torch.Tensor = _all_gather(a, group).view(_world_size(group), *a.shape)
    return shards.transpose(0, 1).reshape(a.shape[0], -1)


@torch.library.custom_op("peerlane::all_gather_gemm", mutates_args=())
def _all_gather_gemm(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    kit = _kit(a, group)
    if kit is None or a.dtype not in gemm.ELEMENT_TYPES or not (a.numel() and b.numel()):
        gathered: torch.Tensor = _gather_columns(a, group) @ b
        return gathered
    multiply = _fused_gather(kit, a.shape[0], a.shape[1], a.dtype, n=b.shape[1])
    product: torch.Tensor = multiply(gemm.aligned(a), b).contiguous()
    return product


@torch.library.custom_op("peerlane::gemm_all_gather", mutates_args=())
def _gemm_all_gather(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    kit = _kit(a, group)
    if kit is None or a.dtype not in gemm.ELEMENT_TYPES or not (a.numel() and b.numel()):
        return _gather_columns(a @ b, group)
    multiply = _fused_columns(kit, a.shape[0], b.shape[1], a.dtype)
    return multiply(gemm.aligned(a), b).clone(memory_format=torch.contiguous_format)


# --- shapes ---


for _same_shape in (_all_reduce, _all_to_all):
    _same_shape.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_all_gather.register_fake(lambda x, group: x.new_empty((_world_size(group) * x.shape[0], *x.shape[1:])))
_reduce_scatter.register_fake(lambda x, group: x.new_empty((x.shape[0] // _world_size(group), *x.shape[1:])))
_all_gather_gemm.register_fake(lambda a, b, group: a.new_empty((a.shape[0], b.shape[1])))
_gemm_all_gather.register_fake(lambda a, b, group: a.new_empty((a.shape[0], _world_size(group) * b.shape[1])))


# --- gradients ---


def _remember_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[-1]


def _remember_product(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.group = inputs
    ctx.save_for_backward(a, b)


def _gather_gemm_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    a, b = ctx.saved_tensors
    return _scatter_columns(grad @ b.T, a.shape[1], ctx.group), _gather_columns(a, ctx.group).T @ grad, None


def _product_gradients(own: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor, None]]:
    """Returns the gradients of a product's operands. ``own``: the gradient of this rank's product, from that of the result."""

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (a, b), whole = ctx.saved_tensors, own(ctx, grad)
        return whole @ b.T, a.T @ whole, None

    return gradients


_of_columns = _product_gradients(lambda ctx, grad: _scatter_columns(grad, ctx.saved_tensors[1].shape[1], ctx.group))
_all_reduce.register_autograd(lambda ctx, grad: (_all_reduce(grad, ctx.group), None), setup_context=_remember_group)
_all_gather.register_autograd(lambda ctx, grad: (_reduce_scatter(grad, ctx.group), None), setup_context=_remember_group)
_reduce_scatter.register_autograd(lambda ctx, grad: (_all_gather(grad, ctx.group), None), setup_context=_remember_group)
_all_to_all.register_autograd(lambda ctx, grad: (_all_to_all(grad, ctx.group), None), setup_context=_remember_group)
_all_gather_gemm.register_autograd(_gather_gemm_gradients, setup_context=_remember_product)
_gemm_all_gather.register_autograd(_of_columns, setup_context=_remember_product)


# --- what users call ---


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the sum of all ranks' ``x``."""
    total: torch.Tensor = _all_reduce(x, _name(group))
    return total


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns all ranks' ``x`` along axis 0, in rank order."""
    gathered: torch.Tensor = _all_gather(x, _name(group))
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns this rank's part, of W equal ones along axis 0, of the sum of all ranks' ``x``."""
    part: torch.Tensor = _reduce_scatter(x, _name(group))
    return part


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns to rank r part r, of W equal ones along axis 0, of every rank's ``x``, in rank order."""
    received: torch.Tensor = _all_to_all(x, _name(group))
    return received


def all_gather_gemm(a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns ``cat(all ranks' a, dim=1) @ b``: (m, k/W) and (k, n) give (m, n). bfloat16 and float16 run as one kernel."""
    product: torch.Tensor = _all_gather_gemm(a, b, _name(group))
    return product


def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: gemm.Activation = "none",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the summed ``a @ b``: (m, k) and (k, n) give (m/W, n). bfloat16 and float16 run as one kernel.

    The kernel finishes a sum as ``activation(scale * sum + bias) + residual``: bias (n), residual of the result's shape."""
    return _scattered_product(a, b, _Behind(bias, activation, residual, scale), group)


def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: gemm.Activation = "none",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns the sum of all ranks' ``a @ b``. a (m, k), b (k, n); (m, n).

    The kernel finishes a sum as ``activation(scale * sum + bias) + residual``: bias (n), residual of the result's shape."""
    return _all_reduced_product(a, b, _Behind(bias, activation, residual, scale), group)


def gemm_all_gather(a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns all ranks' ``a @ b`` side by side. a (m, k), b (k, n); (m, W n)."""
    product: torch.Tensor = _gemm_all_gather(a, b, _name(group))
    return product
