"""All-reduce, residual and RMSNorm as one operator: what stands behind every row-parallel layer while a model decodes."""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device.collectives import rms_norm
from peerlane.device.collectives.rms_norm import BLOCK_COLUMNS
from peerlane.device.products.quantised import LARGEST, quantise_parts
from peerlane.errors import UsageError
from peerlane.ops.check import no_kernel
from peerlane.ops.direct import operator
from peerlane.ops.groups import group_name, kit_group, world_size
from peerlane.ops.transport import summed
from peerlane.settings import batch_invariant

FP8 = torch.float8_e4m3fn
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@operator("all_reduce_rms_norm")
def _all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    epsilon: float,
    weight_offset: float,
    quantisation: str,
    group: str,
) -> Three:
    """Returns y, the sum, and the scales of quantisation by token or by block, or none of them."""
    rows, ranks = x.reshape(-1, x.shape[-1]).contiguous(), world_size(group)
    served = quantisation != "block" or rms_norm.serves_blocks(rows.shape[1])
    kit = kit_group(x, group) if served and _has_kernel(rows, weight, residual, ranks) else None
    if kit is not None:
        norm = rms_norm.all_reduce_rms_norm(kit, rows.shape[1], rows.dtype)
        added = None if residual is None else residual.reshape(rows.shape).contiguous()
        y, total, scales = norm(
            rows,
            weight.contiguous(),
            added,
            epsilon=epsilon,
            quantisation=quantisation,  # type: ignore[arg-type]
            scale=scale,
            weight_offset=weight_offset,
            batch_invariant=batch_invariant(),
        )
        found = x.new_empty(0, dtype=torch.float32) if scales is None else scales.view(_scale_shape(x.shape, quantisation))
        return y.view(x.shape), total.view(x.shape), found
    no_kernel("all_reduce_rms_norm", group, x, weight)
    total = summed(x.to(torch.promote_types(x.dtype, torch.float32)), group)
    total = (total if residual is None else total + residual).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(total.to(wide), x.shape[-1:], weight.to(wide) + weight_offset, epsilon)
    if quantisation == "none":
        return y.to(x.dtype), total, x.new_empty(0, dtype=torch.float32)
    if scale is not None:
        return (y.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), total, x.new_empty(0, dtype=torch.float32)
    parts = quantise_parts(y, BLOCK_COLUMNS if quantisation == "block" else x.shape[-1])
    return parts.values, total, parts.scales.view(_scale_shape(x.shape, quantisation))


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, ranks: int) -> bool:
    one_dtype = weight.dtype == rows.dtype and (residual is None or residual.dtype == rows.dtype)
    fits = not rows.shape[1] % 8 and rows.shape[1] >= 8 * ranks
    return one_dtype and fits and ranks > 1 and rows.dtype in rms_norm.DTYPES


def _scale_shape(x: torch.Size, quantisation: str) -> tuple[int, ...]:
    """Returns the shape of the scales of a norm of this shape: of its tokens, or of each one's blocks."""
    return {"token": tuple(x[:-1]), "block": (*x[:-1], x[-1] // BLOCK_COLUMNS)}.get(quantisation, (0,))


@_all_reduce_rms_norm.register_fake
def _(x: torch.Tensor, *others: Any) -> Three:
    *_, quantisation, _group = others
    y = x.new_empty(x.shape, dtype=x.dtype if quantisation == "none" else FP8)
    return y, x.new_empty(x.shape), x.new_empty(_scale_shape(x.shape, quantisation), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    _, weight, residual, _, ctx.epsilon, ctx.weight_offset, ctx.quantisation, ctx.group = inputs
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, output[1])


def norm_gradients(
    weight: torch.Tensor, total: torch.Tensor, epsilon: float, dy: torch.Tensor | None, dtotal: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of ``total``, in float32 at least, and of ``weight``, of those of its norm and of ``total`` itself."""
    wide = torch.promote_types(total.dtype, torch.float32)
    grad = None if dtotal is None else dtotal.to(wide)
    if dy is None:
        return grad, None
    t = total.to(wide)
    factor = (t.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    g = dy.to(wide) * weight.to(wide)
    of_norm = factor * g - t * factor**3 * (g * t).mean(-1, keepdim=True)
    dweight = (dy.to(wide) * t * factor).flatten(0, -2).sum(0).to(weight.dtype)
    return of_norm if grad is None else grad + of_norm, dweight


def _gradients(ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    if ctx.quantisation != "none":
        raise UsageError("the gradient of an all-reduce and RMSNorm in fp8: expected no quantisation where a gradient is wanted")
    weight, total = ctx.saved_tensors
    grad, dweight = norm_gradients(weight + ctx.weight_offset if ctx.weight_offset else weight, total, ctx.epsilon, dy, dtotal)
    if grad is None:
        return (None,) * 8
    shared = grad.to(total.dtype)
    return torch.ops.peerlane.all_reduce(shared, ctx.group), dweight, shared if ctx.has_residual else None, None, None, None, None, None


_all_reduce_rms_norm.register_autograd(_gradients, setup_context=_remember)


def all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``rms_norm(total) * weight`` and ``total``, the sum of all ranks' ``x`` plus ``residual``, rounded once.

    x and residual (..., H), weight (H); residual and weight the same on all ranks. ``weight_offset`` is added to ``weight`` in float32: 1
    for Gemma, which keeps weights less one. One kernel for every 512 tokens of bfloat16 or float16,
    H a multiple of 8; else an all-reduce in float32 and a norm."""
    y, total, _ = _all_reduce_rms_norm(x, weight, residual, None, epsilon, weight_offset, "none", group_name(group))
    return y, total


def all_reduce_rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    by: Literal["token", "block"] = "token",
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> Three:
    """Returns the norm in float8_e4m3fn, ``total``, and the scale by which the norm is the first result times it.

    ``scale``: one float32 on the device, for all tokens; what is too large becomes the largest number. None: a scale ``by`` "token", its
    largest absolute value over 448, of shape (...), or by "block", one for every 128 columns, (..., H / 128). Otherwise as
    ``all_reduce_rms_norm``; there is no gradient."""
    if by not in ("token", "block") or (by == "block" and (scale is not None or x.shape[-1] % BLOCK_COLUMNS)):
        raise UsageError(
            f"by={by!r} for {x.shape[-1]} columns with {'no' if scale is None else 'a'} scale: expected 'token' or 'block', the latter "
            f"without a scale, for a multiple of {BLOCK_COLUMNS} columns"
        )
    quantisation = by if scale is None else "tensor"
    y, total, found = _all_reduce_rms_norm(x, weight, residual, scale, epsilon, weight_offset, quantisation, group_name(group))
    return y, total, found if scale is None else scale
