"""Products of operands in e4m3 with scales: the kernels of 16 bits, with another matrix instruction and scales, ``products/scales.cuh``.

    x8, w8 = quantise(x, "row"), quantise(weight, "row")          (m, k) and (n, k), contiguous along k
    y = product(group, x8, w8.t())                                x @ weight.t() in bfloat16

Both operands lie along k, a multiple of 16. Scales have the axes of their operand, each of one element, of all, or of one for every 128:

    | by       | left (m, k)  | right (k, n)       |                                                                          |
    |----------|--------------|--------------------|--------------------------------------------------------------------------|
    | "tensor" | (1, 1)       | (1, 1)             | applied to sums; sums grow in the matrix units, of about 14 bits, or, if |
    | "row"    | (m, 1)       | (1, n)             | ``promoted``, in fp32 from one 128 of k to the next                      |
    | "block"  | (m, k / 128) |                    | always promoted                                                          |
    | "square" | (m, k) / 128 | (k / 128, n / 128) | always promoted; a left one's scales are copied for each row             |

``t()`` of a quantised matrix is its transpose, without a copy: so a layer's weight (n, k) is a right operand as it lies.
"""

from collections.abc import Sequence
from typing import Unpack, cast

import torch

from peerlane.device.host.group import Group
from peerlane.device.products import gemm
from peerlane.device.products.gemm import Activation, Epilogue
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter
from peerlane.device.products.grouped_gemm import grouped_product
from peerlane.device.products.quantised import ALIGNMENT, E4M3, Quantised, by_rows, opened, packed
from peerlane.device.products.row_gather_gemm import row_gather_gemm
from peerlane.device.products.scales import BLOCK, PAIR, Scaling
from peerlane.errors import UsageError


def scaling_of(a: Quantised, b: Quantised, promoted: bool) -> Scaling:
    """Returns how a product of a (m, k) and b (k, n), or (groups, k, n), is scaled. Raises UsageError unless there is a kernel for it."""
    m, k, n = *a.values.shape[-2:], b.values.shape[-1]
    blocks, columns = -(-k // BLOCK), -(-n // BLOCK)
    lead = tuple(b.values.shape[:-2])
    left, right = tuple(a.scales.shape), tuple(b.scales.shape)
    fits = (
        a.values.dim() == 2
        and b.values.dim() in (2, 3)
        and b.values.shape[-2] == k
        and k % ALIGNMENT == 0
        and {a.values.dtype, b.values.dtype} == {E4M3}
        and {a.scales.dtype, b.scales.dtype} == {torch.float32}
        and 0 not in (m, n, k)
        and right[:-2] == lead
    )
    if fits and left == (m, blocks) and right[-2:] == (blocks, columns):
        return "fp8_blocks"  # first, so that a rank whose k is a single block takes the kernel of the others
    if fits and left in ((1, 1), (m, 1)) and right[-2:] in ((1, 1), (1, n)):
        return "fp8_promoted" if promoted else "fp8"
    if fits and left == (-(-m // BLOCK), blocks) and right[-2:] == (blocks, columns):
        return "fp8_blocks"
    raise UsageError(
        f"a product of {tuple(a.values.shape)} in {a.values.dtype} with scales {left} in {a.scales.dtype} and {tuple(b.values.shape)} in "
        f"{b.values.dtype} with scales {right} in {b.scales.dtype}: expected (m, k) and (k, n) in {E4M3}, k a multiple of {ALIGNMENT}, and "
        f"float32 scales (1, 1) or (m, 1) with (1, 1) or (1, n), or (m, k / {BLOCK}) or (m, k) / {BLOCK} with (k, n) / {BLOCK}; "
        "see quantise"
    )


def left_pairs(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows (..., m, k) as pairs (..., m, k / 2): as they lie, or a copy if rows do not begin at multiples of 16 bytes."""
    lies_well = values.stride(-1) == 1 and all(stride % ALIGNMENT == 0 for stride in values.stride()[:-1])
    if not lies_well or values.data_ptr() % ALIGNMENT or (values.dim() == 3 and not values.is_contiguous()):
        values = values.contiguous()
    return values.view(torch.uint8).view(dtype)


def right_pairs(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a right operand (..., k, n) as pairs (..., k / 2, n), contiguous along k."""
    return left_pairs(values.mT, dtype).mT


def _terms(a: Quantised, b: Quantised) -> gemm.Terms:
    return {"a_scales": a.scales.unsqueeze(0), "b_scales": b.scales.mT.unsqueeze(0)}


class Behind(gemm.Terms, total=False):
    """What follows a sum, and how sums grow."""

    activation: Activation
    promoted: bool
    dtype: torch.dtype
    batch_invariant: bool


def _epilogue(behind: Behind, bias: bool, scaling: Scaling) -> Epilogue:
    residual, scaled, fixed = behind.get("residual") is not None, behind.get("scale", 1.0) != 1, behind.get("batch_invariant", False)
    return Epilogue(behind.get("activation", "none"), bias, residual, scaled, fixed, scaling)


def prepared(a: Quantised, b: Quantised, behind: Behind) -> tuple[torch.Tensor, torch.Tensor, Epilogue, gemm.Terms]:
    """Returns both operands as pairs, the epilogue, and what a call gives it."""
    scaling, dtype = scaling_of(a, b, behind.get("promoted", False)), behind.get("dtype", torch.bfloat16)
    a, bias, residual, scale = by_rows(a), behind.get("bias"), behind.get("residual"), behind.get("scale", 1.0)
    epilogue = _epilogue(behind, bias is not None, scaling)
    terms = cast(gemm.Terms, {"bias": bias, "residual": residual, "scale": scale, **_terms(a, b)})
    return left_pairs(a.values, dtype), right_pairs(b.values, dtype), epilogue, terms


def product(group: Group, a: Quantised, b: Quantised, **behind: Unpack[Behind]) -> torch.Tensor:
    """Returns ``a @ b`` of one rank, (m, n), in bfloat16 or float16 (``dtype``)."""
    left, right, epilogue, terms = prepared(a, b, behind)
    return gemm.product(group, left.shape[0], right.shape[1], left.shape[1], left.dtype, epilogue)(left, right, **terms)


def product_reduce_scatter(group: Group, a: Quantised, b: Quantised, **behind: Unpack[Behind]) -> torch.Tensor:
    """Returns this rank's rows of the sum over ranks of ``a @ b``; see :class:`GemmReduceScatter`. Partial sums travel in ``dtype``."""
    left, right, epilogue, terms = prepared(a, b, behind)
    return gemm_reduce_scatter(group, left.shape[0], right.shape[1], left.dtype, epilogue)(left, right, **terms)


def product_all_reduce(group: Group, a: Quantised, b: Quantised, **behind: Unpack[Behind]) -> torch.Tensor:
    """Returns the sum over ranks of ``a @ b``, in the arena; see :class:`GemmAllReduce`. Partial sums travel in ``dtype``."""
    left, right, epilogue, terms = prepared(a, b, behind)
    return gemm_all_reduce(group, left.shape[0], right.shape[1], left.dtype, epilogue)(left, right, **terms)


def row_gather_products(
    group: Group,
    a: Quantised,
    bs: Sequence[Quantised],
    *,
    biases: Sequence[torch.Tensor] = (),
    keeps: bool = False,
    **behind: Unpack[Behind],
) -> tuple[list[torch.Tensor], Quantised | None]:
    """Returns ``cat(all ranks' a) @ b`` for each b, and all ranks' rows if it ``keeps`` them; see :class:`RowGatherGemm`. Rows travel in
    e4m3, with their scales. All b's are scaled in one way."""
    promoted, dtype = behind.get("promoted", False), behind.get("dtype", torch.bfloat16)
    kinds = {scaling_of(a, b, promoted) for b in bs}
    if len(kinds) != 1:
        raise UsageError(f"products of gathered rows with {len(bs)} right operands, scaled as {sorted(kinds)}: expected one kind of scales")
    (scaling,) = kinds
    (m, k), rows = a.values.shape, packed(by_rows(a), scaling, dtype)
    multiply = row_gather_gemm(group, m, k // PAIR, dtype, _epilogue(behind, bool(biases), scaling), keeps)
    outs = multiply(
        rows,
        [right_pairs(b.values, dtype) for b in bs],
        biases=biases,
        residual=behind.get("residual"),
        scale=behind.get("scale", 1.0),
        b_scales=[b.scales.mT.unsqueeze(0) for b in bs],
    )
    whole = opened(outs.pop(), scaling, -(-k // BLOCK) if scaling == "fp8_blocks" else 1) if keeps else None
    return outs, whole


def grouped(
    group: Group,
    a: Quantised,
    b: Quantised,
    ends: torch.Tensor,
    *,
    promoted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Returns rows [ends[g - 1], ends[g]) of a (rows, k) times b[g] (groups, k, n); see :class:`GroupedProduct`."""
    scaling, (groups, k, n) = scaling_of(a, b, promoted), b.values.shape
    multiply = grouped_product(group, a.values.shape[0], (groups, n, k // PAIR), dtype, None, scaling, batch_invariant)
    left, right = left_pairs(a.values, dtype), left_pairs(b.values.mT, dtype)
    return multiply(left, right, ends, by_rows(a).scales.unsqueeze(0), b.scales.mT)
