"""Reduce-scatter, residual, RMSNorm and all-gather as one operator: what stands between the products of sequence-parallel layers."""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device.collectives.sharded_rms_norm import BLOCK_COLUMNS, serves, sharded_rms_norm
from peerlane.device.products.quantised import quantise_parts
from peerlane.errors import UsageError
from peerlane.ops.check import no_kernel, same_call
from peerlane.ops.direct import operator
from peerlane.ops.groups import group_name, kit_group, world_size
from peerlane.ops.norms import FP8, Three, norm_gradients
from peerlane.ops.shapes import rows
from peerlane.ops.transport import gathered, scattered
from peerlane.settings import batch_invariant


@operator("reduce_scatter_rms_norm")
def _reduce_scatter_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gathers: bool, epsilon: float, quantisation: str, group: str
) -> Three:
    """Returns y, this rank's rows of the sum, and y's scales or none."""
    own = _checked(x, weight, residual, quantisation, group)
    same_call("reduce_scatter_rms_norm", group, x, weight)
    ranks, columns = world_size(group), x.shape[-1]
    one_dtype = weight.dtype == x.dtype and (residual is None or residual.dtype == x.dtype)
    fits = ranks > 1 and one_dtype and serves(columns, x.dtype, quantisation)  # type: ignore[arg-type]
    kit = kit_group(x, group) if fits else None
    if kit is not None:
        added = None if residual is None else residual.reshape(-1, columns)
        y, total, scales = sharded_rms_norm(kit)(
            x.reshape(-1, columns),
            weight,
            added,
            reduces=True,
            gathers=gathers,
            epsilon=epsilon,
            quantisation=quantisation,  # type: ignore[arg-type]
            batch_invariant=batch_invariant(),
        )
        y_shape = x.shape if gathers else own
        found = x.new_empty(0, dtype=torch.float32) if scales is None else scales.view(_scale_shape(y_shape, quantisation))
        return y.view(y_shape), total.view(own), found
    no_kernel("reduce_scatter_rms_norm", group, x, weight)
    total = scattered(x.to(torch.promote_types(x.dtype, torch.float32)), group)
    total = (total if residual is None else total + residual).to(x.dtype)
    if quantisation == "none":
        y, scales = F.rms_norm(total, (columns,), weight.to(total.dtype), epsilon), total.new_empty(0, dtype=torch.float32)
    else:
        wide = F.rms_norm(total.float(), (columns,), weight.float(), epsilon)
        parts = quantise_parts(wide, BLOCK_COLUMNS if quantisation == "block" else columns)
        y, scales = parts.values, parts.scales
    if gathers:
        y, scales = gathered(y, group), gathered(scales, group) if quantisation != "none" else scales
    return y, total, scales


def _scale_shape(y: torch.Size, quantisation: str) -> tuple[int, ...]:
    if quantisation == "none":
        return (0,)
    return (*y[:-1], 1 if quantisation == "row" else y[-1] // BLOCK_COLUMNS)


def _checked(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, quantisation: str, group: str) -> torch.Size:
    """Returns the shape of this rank's rows. Raises UsageError for shapes that do not fit."""
    own = torch.Size((rows(x, world_size(group), "reduce_scatter_rms_norm"), *x.shape[1:]))
    blocks = quantisation != "block" or not x.shape[-1] % BLOCK_COLUMNS
    if x.dim() < 2 or weight.shape != x.shape[-1:] or (residual is not None and residual.shape != own) or not blocks:
        raise UsageError(
            f"reduce_scatter_rms_norm got x {tuple(x.shape)}, weight {tuple(weight.shape)}, residual "
            f"{None if residual is None else tuple(residual.shape)}, quantisation {quantisation!r}: expected x (tokens, ..., H), weight "
            f"(H), residual {tuple(own)}, and H a multiple of {BLOCK_COLUMNS} for scales of blocks"
        )
    return own


@_reduce_scatter_rms_norm.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gathers: bool, epsilon: float, quantisation: str, group: str
) -> Three:
    own = _checked(x, weight, residual, quantisation, group)
    y = x.new_empty(x.shape if gathers else own, dtype=x.dtype if quantisation == "none" else FP8)
    return y, x.new_empty(own), x.new_empty(_scale_shape(y.shape, quantisation), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    _, weight, residual, ctx.gathers, ctx.epsilon, ctx.quantisation, ctx.group = inputs
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, output[1])


def _gradients(ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    """Returns the gradients. That of the norm's input is computed for one rank's rows, and gathered: it is every rank's gradient."""
    if ctx.quantisation != "none":
        raise UsageError("the gradient of a reduce-scatter and RMSNorm in fp8: expected no quantisation where a gradient is wanted")
    weight, total = ctx.saved_tensors
    if ctx.gathers:  # also where this rank has no use for y, for others have
        whole = total.new_zeros((world_size(ctx.group) * total.shape[0], *total.shape[1:])) if dy is None else dy
        dy = torch.ops.peerlane.reduce_scatter(whole, ctx.group)
    grad, dweight = norm_gradients(weight, total, ctx.epsilon, dy, dtotal)
    shared = torch.zeros_like(total) if grad is None else grad.to(total.dtype)
    return torch.ops.peerlane.all_gather(shared, ctx.group), dweight, shared if ctx.has_residual else None, None, None, None, None


_reduce_scatter_rms_norm.register_autograd(_gradients, setup_context=_remember)


def reduce_scatter_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    gathers: bool = False,
    epsilon: float = 1e-6,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``rms_norm(total) * weight`` and ``total``: this rank's rows of the sum of all ranks' ``x``, plus ``residual``, rounded once.

    x (tokens, ..., H), residual (tokens / W, ..., H): this rank's rows; weight (H), the same on all ranks. ``gathers``: the norm is that
    of all ranks' rows, (tokens, ..., H); ``total`` stays this rank's. One kernel for bfloat16 or float16, H a multiple of 8 and at most
    16,384; else a reduce-scatter in float32, a norm and an all-gather."""
    y, total, _ = _reduce_scatter_rms_norm(x, weight, residual, gathers, epsilon, "none", group_name(group))
    return y, total


def reduce_scatter_rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    gathers: bool = False,
    by: Literal["row", "block"] = "row",
    epsilon: float = 1e-6,
    group: dist.ProcessGroup | None = None,
) -> Three:
    """Returns the norm in float8_e4m3fn, ``total``, and the scales by which the norm is the first result times them.

    ``by``: "row", a scale for every row, (tokens, ..., 1); "block", one for every 128 columns, (tokens, ..., H / 128): as ``quantize_fp8``
    gives them. A norm that is gathered travels in e4m3 with its scales. Otherwise as ``reduce_scatter_rms_norm``; there is no gradient."""
    if by not in ("row", "block"):
        raise UsageError(f"by={by!r}: expected 'row' or 'block'")
    y, total, scales = _reduce_scatter_rms_norm(x, weight, residual, gathers, epsilon, by, group_name(group))
    return y, total, scales
