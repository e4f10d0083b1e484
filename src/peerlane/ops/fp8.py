"""Products of operands in e4m3 with scales, fused with collectives, as operators without gradients.

    x8, x_scales = ops.quantize_fp8(x, "row")               (m / W, k) and (m / W, 1)
    w8, w_scales = ops.quantize_fp8(weight, "row")          (n, k) and (n, 1), once for a layer
    (y,) = ops.row_gather_gemm_fp8(x8, x_scales, [w8.t()], [w_scales.t()])

``peerlane.device.products.fp8`` says which scales there are. Groups without the kit multiply in float32 what the codes stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from peerlane.device import Group
from peerlane.device.products import fp8
from peerlane.device.products.fp8 import By, Quantised
from peerlane.device.products.gemm import ELEMENT_TYPES, Activation
from peerlane.device.products.row_gather_gemm import MAX_PRODUCTS
from peerlane.errors import UsageError
from peerlane.ops.check import same_call
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size
from peerlane.ops.products import _finish, gathered, scattered, summed
from peerlane.ops.shapes import require_product, require_terms, rows

Tensors = list[torch.Tensor]
Maybe = torch.Tensor | None


@torch.library.custom_op("peerlane::quantize_fp8", mutates_args=())
def _quantize(x: torch.Tensor, by: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = fp8.quantise(x, by)  # type: ignore[arg-type]
    return found.values.contiguous(), found.scales.contiguous()


@_quantize.register_fake
def _(x: torch.Tensor, by: str) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=fp8.E4M3), x.new_empty(fp8.scale_counts(x.shape, by), dtype=torch.float32)  # type: ignore[arg-type]


def _kit(a: torch.Tensor, group: str) -> Group | None:
    return kit_group(a, group) if world_size(group) > 1 else None


def _torch_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    return (a.float() @ b.float()).to(dtype)


# --- all-gather of rows, and products ---


@torch.library.custom_op("peerlane::row_gather_gemm_fp8", mutates_args=())
def _row_gather(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    bs: Sequence[torch.Tensor],
    b_scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    scale: float,
    promoted: bool,
    dtype: torch.dtype,
    group: str,
) -> Tensors:
    behind: Any = {"activation": activation, "scale": scale, "promoted": promoted, "dtype": dtype}
    same_call("row_gather_gemm_fp8", group, a, a_scales, *bs, *biases)
    left, rights, kit = Quantised(a, a_scales), [Quantised(*pair) for pair in zip(bs, b_scales, strict=True)], _kit(a, group)
    if kit is not None:
        outs, _ = fp8.row_gather_products(kit, left, rights, biases=biases, **behind)
        return [out.contiguous() for out in outs]
    codes = gathered(a.view(torch.uint8), group).view(fp8.E4M3)
    whole = Quantised(codes, gathered(a_scales.expand(a.shape[0], -1), group))
    terms = [*biases, *[None] * (len(bs) - len(biases))]
    return [
        _finish(_torch_product(whole, b, dtype), bias, None, activation, scale)  # type: ignore[arg-type]
        for b, bias in zip(rights, terms, strict=True)
    ]


@_row_gather.register_fake
def _(a: torch.Tensor, a_scales: torch.Tensor, bs: Sequence[torch.Tensor], *others: Any) -> Tensors:
    *_, dtype, group = others
    return [a.new_empty((world_size(group) * a.shape[0], b.shape[1]), dtype=dtype) for b in bs]


# --- products that are summed over ranks ---


def _sum(name: str, a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, *others: Any) -> torch.Tensor:
    bias, residual, activation, scale, promoted, dtype, group = others
    same_call(f"{name}_fp8", group, a, a_scales, b, b_scales, *(term for term in (bias, residual) if term is not None))
    left, right, kit = Quantised(a, a_scales), Quantised(b, b_scales), _kit(a, group)
    scatters = name == "gemm_reduce_scatter"
    if kit is None:
        product = _torch_product(left, right, dtype)
        return _finish(scattered(product, group) if scatters else summed(product, group), bias, residual, activation, scale)
    multiply = fp8.product_reduce_scatter if scatters else fp8.product_all_reduce
    found = multiply(kit, left, right, bias=bias, residual=residual, activation=activation, scale=scale, promoted=promoted, dtype=dtype)
    return found.contiguous() if scatters else found.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("peerlane::gemm_reduce_scatter_fp8", mutates_args=())
def _reduce_scatter(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    bias: Maybe,
    residual: Maybe,
    activation: str,
    scale: float,
    promoted: bool,
    dtype: torch.dtype,
    group: str,
) -> torch.Tensor:
    return _sum("gemm_reduce_scatter", a, a_scales, b, b_scales, bias, residual, activation, scale, promoted, dtype, group)


@torch.library.custom_op("peerlane::gemm_all_reduce_fp8", mutates_args=())
def _all_reduce(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    bias: Maybe,
    residual: Maybe,
    activation: str,
    scale: float,
    promoted: bool,
    dtype: torch.dtype,
    group: str,
) -> torch.Tensor:
    return _sum("gemm_all_reduce", a, a_scales, b, b_scales, bias, residual, activation, scale, promoted, dtype, group)


@_reduce_scatter.register_fake
def _(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((rows(a, world_size(others[-1]), "gemm_reduce_scatter_fp8"), b.shape[1]), dtype=others[-2])


@_all_reduce.register_fake
def _(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=others[-2])


# --- what users call ---


def quantize_fp8(x: torch.Tensor, by: By = "row") -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x (..., rows, k) in float8_e4m3fn and float32 scales, by which x is about the first result times the second.

    A scale makes its part's largest number 448. ``by``: "tensor", one scale of shape (..., 1, 1); "row", (..., rows, 1); "block", one for
    each 128 of k, (..., rows, k / 128); "square", one for 128 rows and 128 of k. k is a multiple of 16, which products want. Raises
    UsageError otherwise."""
    fp8.require_rows(x, by)
    values, scales = _quantize(x, by)
    return values, scales


def _require(
    name: str, a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, parts: int = 1
) -> None:
    """Raises UsageError unless there is a product of these operands in e4m3, with these scales, in ``dtype``."""
    require_product(name, a, b, parts=parts)
    if a.dim() != 2 or dtype not in ELEMENT_TYPES:
        raise UsageError(
            f"{name} got a {tuple(a.shape)} and dtype={dtype}: expected two axes, and bfloat16 or float16; flatten a and its scales"
        )
    fp8.scaling_of(Quantised(a, scales[0]), Quantised(b, scales[1]), False)


def row_gather_gemm_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    bs: Sequence[torch.Tensor],
    b_scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    *,
    activation: Activation = "none",
    scale: float = 1.0,
    promoted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    group: GroupLike = None,
) -> Tensors:
    """Returns ``activation(scale * cat(all ranks' a) @ b + bias)`` in ``dtype`` for each b, in one kernel; rows travel in e4m3.

    a (m/W, k) and one to four b's (k, n), contiguous along k, such as ``w8.t()``; scales as :func:`quantize_fp8` gives them, those of a b
    transposed. All ranks and b's are scaled in one way. ``promoted``: sums of 128 of k are added in float32; scales of blocks always do so.
    There is no gradient. Raises UsageError for other shapes."""
    if not 1 <= len(bs) <= MAX_PRODUCTS or len(b_scales) != len(bs) or len(biases) not in (0, len(bs)):
        raise UsageError(
            f"row_gather_gemm_fp8 got {len(bs)} right operands, {len(b_scales)} scales and {len(biases)} biases: expected 1 to "
            f"{MAX_PRODUCTS} operands with scales, and no bias or one for each; join matrices side by side"
        )
    for number, b in enumerate(bs):
        _require("row_gather_gemm_fp8", a, b, (a_scales, b_scales[number]), dtype)
        require_terms("row_gather_gemm_fp8", biases[number] if biases else None, None, (b.shape[1],), dtype)
    outs: Tensors = _row_gather(a, a_scales, list(bs), list(b_scales), list(biases), activation, scale, promoted, dtype, group_name(group))
    return outs


def gemm_reduce_scatter_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: Maybe = None,
    activation: Activation = "none",
    residual: Maybe = None,
    scale: float = 1.0,
    promoted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Returns this rank's rows of the summed ``a @ b`` in ``dtype``: (m, k) and (k, n) give (m/W, n), in one kernel.

    Operands, scales and ``promoted`` as in :func:`row_gather_gemm_fp8`, the rest as in ``gemm_reduce_scatter``. There is no gradient."""
    name = group_name(group)
    _require("gemm_reduce_scatter_fp8", a, b, (a_scales, b_scales), dtype, parts=world_size(name))
    require_terms("gemm_reduce_scatter_fp8", bias, residual, (a.shape[0] // world_size(name), b.shape[1]), dtype)
    found: torch.Tensor = _reduce_scatter(a, a_scales, b, b_scales, bias, residual, activation, scale, promoted, dtype, name)
    return found


def gemm_all_reduce_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    group: GroupLike = None,
    *,
    bias: Maybe = None,
    activation: Activation = "none",
    residual: Maybe = None,
    scale: float = 1.0,
    promoted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Returns the sum of all ranks' ``a @ b`` in ``dtype``: (m, k) and (k, n) give (m, n), in one kernel.

    Operands, scales and ``promoted`` as in :func:`row_gather_gemm_fp8`, the rest as in ``gemm_all_reduce``. There is no gradient."""
    _require("gemm_all_reduce_fp8", a, b, (a_scales, b_scales), dtype)
    require_terms("gemm_all_reduce_fp8", bias, residual, (a.shape[0], b.shape[1]), dtype)
    found: torch.Tensor = _all_reduce(a, a_scales, b, b_scales, bias, residual, activation, scale, promoted, dtype, group_name(group))
    return found
