"""Matrices in e4m3 with scales, for products: by one kernel where the kit serves the group, else by torch. There are no gradients."""

import torch

from peerlane.device.products.quantised import (
    E4M3,
    By,
    opened,
    packed,
    quantise,
    quantise_rows,
    quantise_squares,
    require_rows,
    scale_counts,
)
from peerlane.device.products.scales import PAIR, Scaling, header_bytes
from peerlane.errors import UsageError
from peerlane.ops.direct import operator
from peerlane.ops.groups import GroupLike, group_name, kit_group

Tensors = list[torch.Tensor]
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of rows that kernels make e4m3 of


@operator("quantize_fp8")
def _quantize(x: torch.Tensor, by: str, transposes: bool, group: str) -> Tensors:
    """Returns values and scales, and the values' transpose if it ``transposes``, else nothing."""
    kit = kit_group(x, group) if by == "square" and x.dtype in KERNEL_DTYPES else None
    if kit is None:
        found = quantise(x, by)  # type: ignore[arg-type]
        turned = found.values.mT.contiguous() if transposes else x.new_empty(0, dtype=E4M3)
    else:
        found, copy = quantise_squares(kit, x, transposes=transposes)
        turned = x.new_empty(0, dtype=E4M3) if copy is None else copy.values
    return [found.values.contiguous(), found.scales.contiguous(), turned]


@_quantize.register_fake
def _(x: torch.Tensor, by: str, transposes: bool, group: str) -> Tensors:
    turned = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if transposes else (0,)
    shape = scale_counts(x.shape, by)  # type: ignore[arg-type]
    return [x.new_empty(x.shape, dtype=E4M3), x.new_empty(shape, dtype=torch.float32), x.new_empty(turned, dtype=E4M3)]


@operator("quantize_rows_fp8")
def _quantize_rows(x: torch.Tensor, by: str, gated: bool, group: str) -> torch.Tensor:
    """Returns rows with their scales in front of them, bytes."""
    kit, scaling = kit_group(x, group) if x.dtype in KERNEL_DTYPES else None, _scaling(by)
    if kit is not None:
        found = quantise_rows(kit, x, by, gated=gated)  # type: ignore[arg-type]
    else:
        gate, up = x.chunk(2, -1) if gated else (x, None)
        found = quantise(gate if up is None else torch.nn.functional.silu(gate.float()) * up.float(), by)  # type: ignore[arg-type]
    return packed(found, scaling, torch.uint8)


@_quantize_rows.register_fake
def _(x: torch.Tensor, by: str, gated: bool, group: str) -> torch.Tensor:
    k = x.shape[1] // (2 if gated else 1)
    return x.new_empty((x.shape[0], header_bytes(_scaling(by), k // PAIR) + k), dtype=torch.uint8)


def _scaling(by: str) -> Scaling:
    return "fp8_blocks" if by == "block" else "fp8"


def quantize_fp8(x: torch.Tensor, by: By = "row", *, gated: bool = False, group: GroupLike = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x (..., rows, k) in float8_e4m3fn and float32 scales, by which x is about the first result times the second.

    A scale makes its part's largest number 448. ``by``: "tensor", one scale of shape (..., 1, 1); "row", (..., rows, 1); "block", one for
    each 128 of k, (..., rows, k / 128); "square", one for 128 rows and 128 of k. Rows (rows, k) by "row" or "block" lie with their scales
    in front of them, as ``row_gather_gemm_fp8`` sends them. ``gated``: of such rows (rows, 2 k), silu of the first half times the second.
    k is a multiple of 16, which products want. One kernel but by "tensor", where the kit serves the group. Raises UsageError otherwise."""
    require_rows(x[..., : x.shape[-1] // 2] if gated and x.dim() else x, by)
    in_rows = x.dim() == 2 and by in ("row", "block")
    if gated and not in_rows:
        raise UsageError(f"gated rows {tuple(x.shape)} by {by!r}: expected two axes, by 'row' or 'block'; apply silu before")
    if in_rows:
        k = x.shape[1] // (2 if gated else 1)
        found = opened(_quantize_rows(x, by, gated, group_name(group)), _scaling(by), scale_counts((1, k), by)[1])
        return found.values, found.scales
    values, scales, _ = _quantize(x, by, False, group_name(group))
    return values, scales


def quantize_transposed_fp8(x: torch.Tensor, group: GroupLike = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``quantize_fp8(x, "square")`` and the same values transposed, (..., k, rows) and contiguous along rows: what the products of
    a gradient contract over. Its scales are the others, transposed. Rows are a multiple of 16."""
    require_rows(x, "square")
    require_rows(x.mT, "square")
    values, scales, turned = _quantize(x, "square", True, group_name(group))
    return values, scales, turned
