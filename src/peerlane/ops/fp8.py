"""Products of operands in e4m3 with scales, fused with collectives, as operators without gradients.

    x8, x_scales = ops.quantize_fp8(x, "row")               (m / W, k) and (m / W, 1)
    w8, w_scales = ops.quantize_fp8(weight, "row")          (n, k) and (n, 1), once for a layer
    (y,) = ops.row_gather_gemm_fp8(x8, x_scales, [w8.t()], [w_scales.t()])

``peerlane.device.products.fp8`` says which scales there are. Groups without the kit multiply in float32 what the codes stand for."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from peerlane.device.products import fp8
from peerlane.device.products.gemm import ELEMENT_TYPES, Activation
from peerlane.device.products.quantised import Quantised
from peerlane.device.products.row_gather_gemm import MAX_PRODUCTS
from peerlane.errors import UsageError
from peerlane.ops.check import no_kernel, same_call
from peerlane.ops.direct import operator
from peerlane.ops.groups import GroupLike, group_name, kit_group, world_size
from peerlane.ops.products import _finish
from peerlane.ops.shapes import require_product, require_terms, rows
from peerlane.ops.transport import gathered, scattered, summed
from peerlane.settings import batch_invariant

Tensors = list[torch.Tensor]
Maybe = torch.Tensor | None


def _torch_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    return (a.float() @ b.float()).to(dtype)


def _behind(activation: str, scale: float, promoted: bool, dtype: torch.dtype) -> Any:
    fixed = batch_invariant()
    return {"activation": activation, "scale": scale, "promoted": promoted, "dtype": dtype, "batch_invariant": fixed}


# --- all-gather of rows, and products ---


@operator("row_gather_gemm_fp8")
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
    same_call("row_gather_gemm_fp8", group, a, a_scales, *bs, *biases)
    left, rights, kit = Quantised(a, a_scales), [Quantised(*pair) for pair in zip(bs, b_scales, strict=True)], kit_group(a, group)
    if kit is not None:
        outs, _ = fp8.row_gather_products(kit, left, rights, biases=biases, **_behind(activation, scale, promoted, dtype))
        return [out.contiguous() for out in outs]
    no_kernel("row_gather_gemm_fp8", group, a, *bs)
    whole = Quantised(gathered(a, group), gathered(a_scales.expand(a.shape[0], -1), group))
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
    left, right, kit = Quantised(a, a_scales), Quantised(b, b_scales), kit_group(a, group)
    scatters = name == "gemm_reduce_scatter"
    if kit is None:
        no_kernel(f"{name}_fp8", group, a, b)
        product = _torch_product(left, right, dtype)
        return _finish(scattered(product, group) if scatters else summed(product, group), bias, residual, activation, scale)
    multiply = fp8.product_reduce_scatter if scatters else fp8.product_all_reduce
    found = multiply(kit, left, right, bias=bias, residual=residual, **_behind(activation, scale, promoted, dtype))
    return found.contiguous() if scatters else found.clone(memory_format=torch.contiguous_format)


_SUM = (
    "(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor? bias, Tensor? residual, str activation, float scale, bool promoted, "
    "ScalarType dtype, str group) -> Tensor"
)
_reduce_scatter, _all_reduce = (
    operator(f"{name}_fp8", _SUM)(functools.partial(_sum, name)) for name in ("gemm_reduce_scatter", "gemm_all_reduce")
)


@_reduce_scatter.register_fake
def _(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((rows(a, world_size(others[-1]), "gemm_reduce_scatter_fp8"), b.shape[1]), dtype=others[-2])


@_all_reduce.register_fake
def _(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=others[-2])


# --- products of groups of rows, of one rank ---


@operator("grouped_gemm_fp8")
def _grouped(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    ends: torch.Tensor,
    promoted: bool,
    dtype: torch.dtype,
    group: str,
) -> torch.Tensor:
    left, right, kit = Quantised(a, a_scales), Quantised(b, b_scales), kit_group(a, group)
    if kit is not None:
        return fp8.grouped(kit, left, right, ends, promoted=promoted, dtype=dtype, batch_invariant=batch_invariant())
    no_kernel("grouped_gemm_fp8", group, a, b)
    out, rows, first = a.new_zeros((a.shape[0], b.shape[2]), dtype=dtype), left.float(), 0
    for matrix, end in zip(right.float(), ends.tolist(), strict=True):
        out[first:end] = (rows[first:end] @ matrix).to(dtype)
        first = end
    return out


@_grouped.register_fake
def _(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[2]), dtype=others[-2])


# --- what users call ---


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
    return _row_gather(a, a_scales, list(bs), list(b_scales), list(biases), activation, scale, promoted, dtype, group_name(group))


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
    return _reduce_scatter(a, a_scales, b, b_scales, bias, residual, activation, scale, promoted, dtype, name)


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
    return _all_reduce(a, a_scales, b, b_scales, bias, residual, activation, scale, promoted, dtype, group_name(group))


def grouped_gemm_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    ends: torch.Tensor,
    *,
    promoted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    group: GroupLike = None,
) -> torch.Tensor:
    """Returns rows [ends[g - 1], ends[g]) of a times b[g]: (rows, k) and (groups, k, n) give (rows, n).

    Rows behind the last end are undefined. ``ends``: (groups), int32, as ``handle.ends`` of :func:`dispatch_fp8`, whose rows and scales are
    an a. n is a multiple of 8. Operands, scales and ``promoted`` as in :func:`row_gather_gemm_fp8`. No rank waits for another. There is no
    gradient. Raises UsageError for other shapes."""
    if a.dim() != 2 or b.dim() != 3 or tuple(ends.shape) != b.shape[:1] or ends.dtype != torch.int32 or b.shape[2] % 8:
        raise UsageError(
            f"grouped_gemm_fp8 got a {tuple(a.shape)}, b {tuple(b.shape)} and ends {tuple(ends.shape)} in {ends.dtype}: expected "
            "(rows, k), (groups, k, n), n a multiple of 8, and (groups,) in int32"
        )
    if dtype not in ELEMENT_TYPES:
        raise UsageError(f"grouped_gemm_fp8 got dtype={dtype}: expected bfloat16 or float16")
    fp8.scaling_of(Quantised(a, a_scales), Quantised(b, b_scales), promoted)
    return _grouped(a, a_scales, b, b_scales, ends, promoted, dtype, group_name(group))
