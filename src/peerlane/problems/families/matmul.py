"""What the tensor-parallel matrix products share: operands, products in float64, error models, and the current names of two collectives."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

FLOP_UNIT: Mapping[torch.dtype, str] = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}

# Of so many columns, or fewer, one may be most of a norm: they differ in size by powers of two.
_FEW_COLUMNS = 8

# Error of a product accumulated in float32, relative to |A| |B|: 168 unit roundoffs of float32. That is the random walk of 28672 additions
# (the deepest production sum), taken in any order, and leaves room for the truncating adders of tensor cores.
ACCUMULATION = 1e-5

# A normwise bound speaks of the average rounding error, so it is used on outputs with enough elements for an average.
_ENOUGH_ELEMENTS = 256

# torch 2.13 renames these two collectives; the older names still work there, with a warning.
gather_flat: Callable[[torch.Tensor, torch.Tensor], Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum: Callable[[torch.Tensor, torch.Tensor], Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_depths(case: pc.Case) -> list[int]:
    """K on every rank: ``k`` divided equally, or ``k_by_rank`` (repeated as often as the world needs), which may be unequal."""
    if "k" in case.params:
        return [case["k"] // case.world_size] * case.world_size
    by_rank = case["k_by_rank"]
    return [by_rank[rank % len(by_rank)] for rank in range(case.world_size)]


def activations(case: pc.Case, rank: int, draw: pc.Draw, shape: tuple[int, int], terms: int) -> torch.Tensor:
    """A left operand of N(0, 1) entries; ``terms`` is the depth of the whole sum. ``case["pattern"]`` may make it hard:

    * ``rank_scale``: 8^rank times as large, so that every shard's place matters;
    * ``zero_shard``: rank 0 contributes nothing;
    * ``outliers``: one channel in 16 (at least one) is 100 times as large;
    * ``special``: rank 0 has a NaN in row 1 and the last rank an infinity in the last row but one.
    """
    if draw.integer:
        return draw.sparse_signs(shape, case.dtype, terms=terms)
    pattern = case.params.get("pattern")
    rows, depth = shape
    values = draw.normal(shape, case.dtype, scale=8.0**rank if pattern == "rank_scale" else 1.0)
    if pattern == "zero_shard" and rank == 0:
        values.zero_()
    elif pattern == "outliers":
        values[:, draw.permutation(depth)[: -(-depth // 16)]] *= 100.0
    elif pattern == "special":
        if rank == 0:
            values[1, depth // 2] = float("nan")
        if rank == case.world_size - 1:
            values[rows - 2, depth // 3] = float("inf")
    return values


def weights(case: pc.Case, draw: pc.Draw, shape: tuple[int, int], terms: int) -> torch.Tensor:
    """A right operand of variance 1 / ``terms``, which gives outputs of unit variance, as initialised and trained layers have it."""
    if draw.integer:
        return draw.sparse_signs(shape, case.dtype, terms=terms)
    values = draw.normal(shape, case.dtype, scale=terms**-0.5)
    if case.params.get("pattern") == "outlier_rows":
        values[draw.permutation(shape[0])[: -(-shape[0] // 16)]] *= 100.0
    return values


def add_product(value: torch.Tensor, magnitude: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``value += a @ b`` and ``magnitude += |a| @ |b|``, in float64 and in place."""
    a, b = a.to(FP64), b.to(FP64)
    value.addmm_(a, b)
    magnitude.addmm_(a.abs(), b.abs())


def gemm_tolerance(case: pc.Case, elements: int) -> pc.Tolerance:
    """One product accumulated in float32 and rounded once.

    A correct rounding errs by u relatively and leaves 0.43 u normwise (1.7e-3 in bfloat16); the bounds are 2u and about u.
    ``elements`` counts the output's elements.
    """
    normwise = 4e-3 if case.dtype == BF16 and elements >= _ENOUGH_ELEMENTS else None
    return pc.Tolerance(relative=2 * pc.UNIT_ROUNDOFF[case.dtype], magnitude=ACCUMULATION, normwise=normwise)


def partials_tolerance(case: pc.Case) -> pc.Tolerance:
    """The sum over ranks of products P_q that are rounded to the working dtype, added in it in any order: (W + 1) u sum |P_q|.

    The error within the products is part of the magnitude: see :func:`sum_of_products`. Normwise, bfloat16 partial sums leave 2.5e-3 on
    2 ranks and 4e-3 on 8. Cancelling partials have no normwise bound, nor have a few columns: one of them, whose terms may cancel, can be
    most of the norm (of 5 columns and 3 rows, 2e-2 was seen on 8 ranks).
    """
    averages = case.params.get("pattern") != "cancelling" and case["n"] > _FEW_COLUMNS
    normwise = 1e-2 if case.dtype == BF16 and averages else None
    return pc.Tolerance(magnitude=_partials_unit(case), normwise=normwise)


def _partials_unit(case: pc.Case) -> float:
    return (case.world_size + 1) * pc.UNIT_ROUNDOFF[case.dtype]


def sum_of_products(case: pc.Case, inputs: pc.Inputs, rows: slice) -> pc.Expected:
    """Some rows of sum_q A_q @ B_q. The magnitude is sum |P_q|, plus sum |A_q| |B_q| weighted with the error of accumulation in float32."""
    first_a, first_b = inputs[0]
    shape = (first_a[rows].shape[0], first_b.shape[1])
    value = torch.zeros(shape, dtype=FP64, device=first_a.device)
    magnitude = torch.zeros_like(value)
    weight = ACCUMULATION / _partials_unit(case)
    for a_local, b_local in inputs:
        a, b = a_local[rows].to(FP64), b_local.to(FP64)
        partial = a @ b
        value += partial
        magnitude += partial.abs_()
        magnitude.addmm_(a.abs(), b.abs(), alpha=weight)
    return pc.Expected("product", value, case.dtype, magnitude=magnitude)


def row_parallel_operands(case: pc.Case, rank: int, draw: pc.Draw, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A_r (rows, K_r) and B_r (K_r, n) of a row-parallel layer.

    A's columns differ in size by powers of two that B's rows take back, and B's columns by others, the same on all ranks: products and
    their relative errors are those of equal sizes, but codes of few bits with a scale for many channels lose the small ones.

    Pattern ``cancelling``: neighbouring ranks' products cancel but for noise, A_q = (-1)^q A and B_q = B + noise of a quarter of
    B's size; needs equal depths and an even world size.
    """
    depths = shard_depths(case)
    terms, depth = sum(depths), depths[rank]
    if case.params.get("pattern") == "cancelling" and not draw.integer:
        sign = -1.0 if rank % 2 else 1.0
        common = weights(case, draw.shared, (depth, case["n"]), terms).to(FP32)
        noise = draw.normal((depth, case["n"]), FP32, scale=0.25 * terms**-0.5)
        a, b = sign * activations(case, rank, draw.shared, (rows, depth), terms), (common + noise).to(case.dtype)
    else:
        a, b = activations(case, rank, draw, (rows, depth), terms), weights(case, draw, (depth, case["n"]), terms)
    if not draw.integer:
        inner, outer = draw.shared.octaves((max(depths),))[:depth], draw.shared.octaves((case["n"],))
        a *= inner
        b *= outer / inner.unsqueeze(1)
    return a, b


def gathered_operands(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """A_local (m, K_local), the rank's columns of A, and its own B (W K_local, n). ``case["n_total"]`` is divided by the world size."""
    depth = shard_depths(case)[rank]
    terms = depth * case.world_size
    return activations(case, rank, draw, (case["m"], depth), terms), weights(case, draw, (terms, columns(case)), terms)


def columns(case: pc.Case) -> int:
    """The width of a rank's B: ``n``, or its share of ``n_total``."""
    return int(case["n"] if "n" in case.params else case["n_total"] // case.world_size)


def gathered_product(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """[A_0 | A_1 | ...] @ B_rank, shard by shard, so that no wide copy of the gathered A or of B is held."""
    b = inputs[rank][1]
    value = torch.zeros((inputs[rank][0].shape[0], b.shape[1]), dtype=FP64, device=b.device)
    magnitude = torch.zeros_like(value)
    first = 0
    for a_local, _ in inputs:
        last = first + a_local.shape[1]
        add_product(value, magnitude, a_local, b[first:last])
        first = last
    return pc.Expected("product", value, case.dtype, magnitude=magnitude)


def gathered_tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The tolerance of :func:`gathered_product`."""
    return {"product": gemm_tolerance(case, case["m"] * columns(case))}


def gathered_cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every shard of A crosses the link once to every other rank; A, B and the product cross device memory once."""
    m, n, local, size = case["m"], columns(case), shard_depths(case)[rank], case.dtype.itemsize
    k, port = local * case.world_size, (case.world_size - 1) * m * local * size
    return pc.Cost(
        hbm_bytes=(m * k + k * n + m * n) * size, egress_bytes=port, ingress_bytes=port, flops={FLOP_UNIT[case.dtype]: 2 * m * k * n}
    )


def product_tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The sum over ranks of products P_q, each rounded to the working dtype, added in any order: (W + 1) u sum |P_q|."""
    return {"product": partials_tolerance(case)}


def _gathered_wide(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """One product in float32 over the gathered A, rounded once."""
    a = torch.cat([args[0] for args in inputs], dim=1)
    return torch.mm(a.to(FP32), inputs[rank][1].to(FP32)).to(case.dtype)


def _gathered_shardwise(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Shard by shard in float32, the rank's own shard first and then around the ring, rounded once: the order that overlaps."""
    b = inputs[rank][1].to(FP32).chunk(case.world_size)
    order = [(rank + step) % case.world_size for step in range(case.world_size)]
    return torch.stack([inputs[q][0].to(FP32) @ b[q] for q in order]).sum(0).to(case.dtype)


GATHERED_VARIANTS = pc.alternatives(fp32_accumulation=_gathered_wide, shardwise_own_first=_gathered_shardwise)


def wide_sum_of_products(case: pc.Case, inputs: pc.Inputs, rows: slice) -> torch.Tensor:
    """Some rows of sum_q A_q @ B_q from float32 partial products, never rounded before their sum is."""
    return torch.stack([a[rows].to(FP32) @ b.to(FP32) for a, b in inputs]).sum(0).to(case.dtype)


def one_long_product(case: pc.Case, inputs: pc.Inputs, rows: slice) -> torch.Tensor:
    """Some rows of [A_0 | A_1 | ...] @ [B_0; B_1; ...] in float32, rounded once."""
    a = torch.cat([args[0][rows] for args in inputs], dim=1).to(FP32)
    return torch.mm(a, torch.cat([args[1] for args in inputs]).to(FP32)).to(case.dtype)
