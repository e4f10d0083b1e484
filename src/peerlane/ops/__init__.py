"""Collectives, fused matrix products, attention and experts over ranks as PyTorch operators: with gradients, and shapes for torch.compile.

    from peerlane import ops

    hidden = ops.all_gather_gemm(x, w1)               this rank's columns (m, k/W) and (k, n) give (m, n)
    y = ops.gemm_reduce_scatter(hidden.relu(), w2)    (m, n) and (n, k) give (m/W, k): rows of the sum
    y.square().sum().backward()

Gradients are those of the sum of all ranks' losses, as in ``torch.distributed.nn.functional``. The device kit does the work on GPUs and
emulated ranks. CPU ranks use torch.distributed, for tests. ``group`` is a process group, its name or a DeviceMesh; None means all ranks.
"""

from typing import Any

import torch

from peerlane.device.products import gemm
from peerlane.device.products.all_gather_gemm import all_gather_gemm as _fused_gather
from peerlane.device.products.gemm_all_gather import gemm_all_gather as _fused_columns
from peerlane.ops import replicated
from peerlane.ops.attention import ring_attention, ulysses_attention
from peerlane.ops.check import same_call
from peerlane.ops.collectives import Gradient, _all_gather, _reduce_scatter, all_gather, all_reduce, all_to_all, reduce_scatter, replicate
from peerlane.ops.collectives import replicates as _replicates
from peerlane.ops.direct import operator
from peerlane.ops.dispatch import DispatchConfig, DispatchHandle, combine, dispatch, dispatch_fp8
from peerlane.ops.experts import gated_experts
from peerlane.ops.fp8 import gemm_all_reduce_fp8, gemm_reduce_scatter_fp8, grouped_gemm_fp8, row_gather_gemm_fp8
from peerlane.ops.groups import GroupLike
from peerlane.ops.groups import group_name as _name
from peerlane.ops.groups import world_size as _world_size
from peerlane.ops.memory import close, memory_report
from peerlane.ops.norms import all_reduce_rms_norm, all_reduce_rms_norm_fp8
from peerlane.ops.preparation import ExpertLayers, plain, prepare
from peerlane.ops.products import fused, gemm_all_reduce, gemm_reduce_scatter, row_gather_gemm
from peerlane.ops.quantise import quantize_fp8, quantize_transposed_fp8
from peerlane.ops.shapes import product as _product
from peerlane.ops.sharded_norms import reduce_scatter_rms_norm, reduce_scatter_rms_norm_fp8
from peerlane.ops.sharding import takes_dtensors
from peerlane.ops.uneven import all_gatherv, reduce_scatterv
from peerlane.settings import set_batch_invariant

__all__ = [
    "DispatchConfig", "DispatchHandle", "ExpertLayers", "all_gather", "all_gather_gemm", "all_gatherv", "all_reduce", "all_reduce_rms_norm",
    "all_reduce_rms_norm_fp8", "all_to_all", "close", "combine", "dispatch", "dispatch_fp8", "gated_experts", "gemm_all_gather",
    "gemm_all_reduce", "gemm_all_reduce_fp8", "gemm_reduce_scatter", "gemm_reduce_scatter_fp8", "grouped_gemm_fp8", "memory_report",
    "prepare", "quantize_fp8", "quantize_transposed_fp8", "reduce_scatter", "reduce_scatter_rms_norm", "reduce_scatter_rms_norm_fp8",
    "reduce_scatterv", "replicate", "ring_attention", "row_gather_gemm", "row_gather_gemm_fp8", "set_batch_invariant", "ulysses_attention",
]  # fmt: skip


# --- fused products ---


def _scatter_columns(columns: torch.Tensor, width: int, group: str) -> torch.Tensor:
    """Returns this rank's columns of the sum."""
    parts = columns.reshape(columns.shape[0], _world_size(group), width).transpose(0, 1)
    return _reduce_scatter(parts.flatten(0, 1), group)


def _gather_columns(a: torch.Tensor, group: str) -> torch.Tensor:
    """Returns every rank's columns side by side."""
    return _all_gather(a, group).view(_world_size(group), *a.shape).transpose(0, 1).flatten(1, 2)


@operator("all_gather_gemm")
def _all_gather_gemm(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    same_call("all_gather_gemm", group, a, b)
    kit = fused("all_gather_gemm", group, a, b)
    if kit is None:
        return _gather_columns(a, group) @ b
    multiply = _fused_gather(kit, a.shape[0], a.shape[1], a.dtype, epilogue=plain(), n=b.shape[1])
    return multiply(gemm.aligned(a), b).contiguous()


@operator("gemm_all_gather")
def _gemm_all_gather(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    same_call("gemm_all_gather", group, a, b)
    kit = fused("gemm_all_gather", group, a, b)
    if kit is None:
        return _gather_columns(a @ b, group)
    multiply = _fused_columns(kit, a.shape[0], b.shape[1], a.dtype, plain())
    return multiply(gemm.aligned(a), b).clone(memory_format=torch.contiguous_format)


# --- shapes ---


_all_gather_gemm.register_fake(lambda a, b, group: a.new_empty((a.shape[0], b.shape[1])))
_gemm_all_gather.register_fake(lambda a, b, group: a.new_empty((a.shape[0], _world_size(group) * b.shape[1])))


# --- gradients ---


def _remember_product(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.group = inputs
    ctx.save_for_backward(a, b)


def _gather_gemm_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    a, b = ctx.saved_tensors
    return _scatter_columns(grad @ b.T, a.shape[1], ctx.group), _gather_columns(a, ctx.group).T @ grad, None


def _column_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    a, b = ctx.saved_tensors
    own = _scatter_columns(grad, b.shape[1], ctx.group)
    return own @ b.T, a.T @ own, None


_all_gather_gemm.register_autograd(_gather_gemm_gradients, setup_context=_remember_product)
_gemm_all_gather.register_autograd(_column_gradients, setup_context=_remember_product)


# --- what users call ---


@takes_dtensors
def all_gather_gemm(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Returns ``cat(all ranks' a, dim=-1) @ b``: (..., k/W) and (k, n) give (..., n). bfloat16 and float16 run as one kernel."""
    name = _name(group)
    return _product(lambda a, b, *_: _all_gather_gemm(a, b, name), "all_gather_gemm", (a, b), depth=_world_size(name))


@takes_dtensors
def gemm_all_gather(a: torch.Tensor, b: torch.Tensor, group: GroupLike = None, *, gradient: Gradient = "summed") -> torch.Tensor:
    """Returns all ranks' ``a @ b`` side by side. a (..., k), b (k, n); (..., W n). ``gradient``: as :func:`gemm_all_reduce`."""
    name = _name(group)
    multiply: Any = replicated.GemmAllGather.apply if _replicates(gradient) else _gemm_all_gather
    return _product(lambda a, b, *_: multiply(a, b, name), "gemm_all_gather", (a, b))
