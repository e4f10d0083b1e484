"""Problem 9: gradients of LayerNorm's gain and bias, summed over the ranks' tokens."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, sequential_sum, wide_sum

Pair = tuple[torch.Tensor, torch.Tensor]


def reference(X_hat: torch.Tensor, dY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d_beta = dY.sum(0)
    dist.all_reduce(d_beta)
    d_gamma = (dY * X_hat).sum(0)
    dist.all_reduce(d_gamma)
    return d_gamma, d_beta


def _rows(case: pc.Case, rank: int) -> int:
    """``rows``, ``rows_by_rank`` (repeated as often as the world needs), or the rank's share of ``tokens``."""
    if "rows" in case.params:
        return int(case["rows"])
    if "tokens" in case.params:
        return int(case["tokens"] // case.world_size)
    by_rank = case["rows_by_rank"]
    return int(by_rank[rank % len(by_rank)])


def _total_rows(case: pc.Case) -> int:
    return sum(_rows(case, rank) for rank in range(case.world_size))


def _normalised_dtype(case: pc.Case) -> torch.dtype:
    dtype: torch.dtype = case.params.get("normalised_dtype", case.dtype)
    return dtype


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> Pair:
    """X_hat has rows of mean 0 and variance 1; dY is N(0, s^2) with s from 1/16 to 16 per column, so that the sums, which are sent, fit no
    code with one scale for neighbours. ``case["pattern"]``:

    * ``unit_rows``: rows of X_hat have norm 1 instead, as in the public benchmark
    * ``column_bias``: a column of dY has a mean between s and 4 s, or -4 s and -s, so that most of its terms have one sign
    * ``rank_scale``: dY is 2^10 times as large on the last rank
    * ``outlier``: one channel of X_hat is 100 times as large
    * ``special``: dY has a NaN in column 1 of rank 0, X_hat an infinity in the last column of the last rank
    """
    shape = (_rows(case, rank), case["hidden"])
    if draw.integer:
        # Sums of n d terms -1 and 1 have a standard deviation of at most 32: eight of them are exact in bfloat16, in any order.
        density = min(2 / 3, 1024 / max(_total_rows(case), 1))
        uniform = draw.uniform(shape, FP32)
        signs = (uniform < density / 2).to(FP32) - (uniform >= 1 - density / 2).to(FP32)
        return (draw.integers(0, 2, shape, FP32) * 2 - 1).to(_normalised_dtype(case)), signs.to(case.dtype)
    pattern = case.params.get("pattern")
    values = draw.normal(shape, FP32)
    if pattern == "unit_rows":
        normalised = torch.nn.functional.normalize(values, dim=-1)
    else:
        normalised = torch.nn.functional.layer_norm(values, shape[1:])
    gradient = draw.normal(shape, FP32)
    last = rank == case.world_size - 1
    match pattern:
        case "column_bias":
            sign = draw.shared.integers(0, 2, (shape[1],), FP32) * 2 - 1
            gradient += sign * draw.shared.uniform((shape[1],), FP32, low=1.0, high=4.0)
        case "rank_scale" if last:
            gradient *= 2.0**10
        case "outlier":
            normalised[:, draw.shared.permutation(shape[1])[0]] *= 100.0
        case "special":
            if rank == 0:
                gradient[shape[0] // 2, 1] = float("nan")
            if last:
                normalised[shape[0] // 2, -1] = float("inf")
    gradient *= draw.shared.octaves(shape[1:])
    return normalised.to(_normalised_dtype(case)), gradient.to(case.dtype)


def _sums_expected(name: str, case: pc.Case, terms: Sequence[torch.Tensor], dtype: torch.dtype, *, rounded_terms: bool) -> pc.Expected:
    """The column sums of all ranks' terms in float64. The magnitude is the error model's, in units of the dtype's roundoff u:

    (W + 1) sum |p_q| for ranks' partial sums p_q that are rounded and added in the dtype; 4 A with A the root of the sum of squared terms,
    where terms may be rounded before they are added; and the random walk of n additions in float32, sqrt(n) (A + sum |p_q|).
    """
    total = torch.zeros(case["hidden"], dtype=FP64, device=terms[0].device)
    partials, squares = torch.zeros_like(total), torch.zeros_like(total)
    for term in terms:
        partial = term.sum(0)
        total += partial
        partials += partial.abs()
        squares += term.square().sum(0)
    spread = squares.sqrt()
    walk = _total_rows(case) ** 0.5 * pc.UNIT_ROUNDOFF[FP32] / pc.UNIT_ROUNDOFF[dtype]
    magnitude = (case.world_size + 1) * partials + (4 if rounded_terms else 0) * spread + walk * (spread + partials)
    return pc.Expected(name, total, dtype, magnitude=magnitude)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, pc.Expected]:
    gradients = [dY.to(FP64) for _, dY in inputs]
    products = [dY * X_hat.to(FP64) for dY, (X_hat, _) in zip(gradients, inputs, strict=True)]
    product_dtype = torch.promote_types(case.dtype, _normalised_dtype(case))
    return (
        _sums_expected("d_gamma", case, products, product_dtype, rounded_terms=True),
        _sums_expected("d_beta", case, gradients, case.dtype, rounded_terms=False),
    )


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The oracle's magnitude, in units of u, and one more u for the result.

    Normwise, where there are channels enough for an average and none outweighs the others, bfloat16 partial sums leave 2.5e-3 on 2 ranks
    and 4.5e-3 on 8.
    """
    average = case["hidden"] >= 256 and case.params.get("pattern") != "outlier"

    def of(dtype: torch.dtype) -> pc.Tolerance:
        u = pc.UNIT_ROUNDOFF[dtype]
        size = "W + 1 times the sum of the absolute values of all ranks' partial sums, and what rounding of their terms may add"
        return pc.Tolerance(relative=u, magnitude=u, normwise=1e-2 if dtype == BF16 and average else None, size=size)

    return {"d_gamma": of(torch.promote_types(case.dtype, _normalised_dtype(case))), "d_beta": of(case.dtype)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Both arguments are read once; one message with both sums is all-reduced."""
    elements, hidden, world = _rows(case, rank) * case["hidden"], case["hidden"], case.world_size
    x_size = _normalised_dtype(case).itemsize
    result = hidden * (case.dtype.itemsize + torch.promote_types(case.dtype, _normalised_dtype(case)).itemsize)
    port = pc.traffic.all_reduce(result, world)
    return pc.Cost(
        hbm_bytes=elements * (x_size + case.dtype.itemsize) + result, egress_bytes=port, ingress_bytes=port, flops={"fp32": 3 * elements}
    )


def _in_float32(inputs: pc.Inputs, ranks: Sequence[int]) -> Pair:
    """Both sums over some ranks' tokens in float32, rounded once."""
    x_hats, gradients = zip(*(inputs[q] for q in ranks), strict=True)
    wide = [(x.to(FP32), dy.to(FP32)) for x, dy in zip(x_hats, gradients, strict=True)]
    d_gamma = torch.stack([(dy * x).sum(0) for x, dy in wide]).sum(0)
    d_beta = torch.stack([dy.sum(0) for _, dy in wide]).sum(0)
    return d_gamma.to(torch.promote_types(x_hats[0].dtype, gradients[0].dtype)), d_beta.to(gradients[0].dtype)


def _rounded_products(case: pc.Case, inputs: pc.Inputs, rank: int) -> Pair:
    """Products, ranks' sums and every addition across ranks rounded."""
    return (
        sequential_sum([(dY * X_hat).to(FP32).sum(0).to(torch.promote_types(dY.dtype, X_hat.dtype)) for X_hat, dY in inputs]),
        sequential_sum([dY.to(FP32).sum(0).to(dY.dtype) for _, dY in inputs]),
    )


def _one_long_sum(case: pc.Case, inputs: pc.Inputs, rank: int) -> Pair:
    """All ranks' tokens row by row in float32, with the products rounded."""
    return (wide_sum(list(torch.cat([dY * X_hat for X_hat, dY in inputs]))), wide_sum(list(torch.cat([dY for _, dY in inputs]))))


def _narrow_accumulator(context: pc.AnswerContext) -> Pair:
    """Every addition rounded to the dtype: a sum of one sign stops growing once a term is less than half its spacing."""
    totals = []
    for terms in zip(*((dY * X_hat, dY) for X_hat, dY in context.inputs), strict=True):
        rows = torch.cat([term.to(context.case.dtype) for term in terms])
        totals.append(sequential_sum(list(rows)))
    return totals[0], totals[1]


def _scaled(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor


PROBLEM = pc.Problem(
    id=9,
    slug="layernorm_backward",
    title="Gradients of LayerNorm's gain and bias, summed over all ranks' tokens",
    category="data_parallel",
    parallelism=("data", "sequence"),
    origin="the weight and bias gradients of LayerNorm under data or sequence parallelism, as in Apex and Megatron-LM",
    summary=(
        "X_hat (B, H) are normalised activations and dY (B, H) the gradient of the layer's output; B may differ from rank to rank. Every "
        "rank returns d_gamma (H,), the sum of dY X_hat over all ranks' rows, in the promoted dtype of both, and d_beta (H,), the sum of "
        "dY, in dY's dtype. Products and ranks' sums may be rounded or kept wider."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_dinov2_vit_g",
    presets=(
        pc.preset(
            "small",
            "unequal and missing rows, sums of one sign, ranks and channels of unlike scale, mixed dtypes, NaN and infinity",
            pc.case("ragged_bf16", BF16, rows_by_rank=(3, 7, 0, 5), hidden=65),
            pc.case("ragged_fp32", FP32, rows_by_rank=(3, 7, 0, 5), hidden=33),
            pc.case("equal_bf16", BF16, rows=5, hidden=161),
            pc.case("mixed", BF16, rows_by_rank=(3, 8), hidden=33, normalised_dtype=FP32),
            pc.case("column_bias_bf16", BF16, rows=700, hidden=65, pattern="column_bias", world_sizes=(2, 4)),
            pc.case("column_bias_fp32", FP32, rows=700, hidden=65, pattern="column_bias", world_sizes=(2, 4)),
            pc.case("rank_scale_bf16", BF16, rows=19, hidden=300, pattern="rank_scale"),
            pc.case("outlier_bf16", BF16, rows=19, hidden=300, pattern="outlier"),
            pc.case("special_bf16", BF16, rows=5, hidden=33, pattern="special"),
        ),
        pc.preset(
            "pkb",
            "the public benchmark's shape; also with its rows of norm 1",
            pc.case("bf16", BF16, rows=1024, hidden=1024),
            pc.case("unit_rows_bf16", BF16, rows=1024, hidden=1024, pattern="unit_rows"),
        ),
        pc.preset(
            "production_gpt3_175b", "sequence parallel: 8192 tokens over all ranks", pc.case("bf16", BF16, tokens=8192, hidden=12288)
        ),
        pc.preset("production_dinov2_vit_g", "65536 tokens per rank", pc.case("bf16", BF16, rows=65536, hidden=1536)),
        pc.preset("production_falcon_180b", "4096 tokens per rank", pc.case("bf16", BF16, rows=4096, hidden=14848)),
    ),
    known_wrong_answers=(
        pc.wrong("mean", "the mean over ranks instead of the sum", lambda c: _scaled(c.answer, 1 / c.case.world_size)),
        pc.wrong("swapped", "d_beta first", lambda c: tuple(a.to(b.dtype) for a, b in zip(c.answer[::-1], c.answer, strict=True))),
        pc.wrong("bias_only", "d_beta for both", lambda c: (c.answer[1].to(c.answer[0].dtype), c.answer[1])),
        pc.wrong("gain_missing", "d_gamma zero", lambda c: (torch.zeros_like(c.answer[0]), c.answer[1])),
        pc.wrong("bias_not_reduced", "d_gamma right, d_beta the rank's own", lambda c: (c.answer[0], _in_float32(c.inputs, [c.rank])[1])),
        pc.wrong("gain_not_reduced", "d_beta right, d_gamma the rank's own", lambda c: (_in_float32(c.inputs, [c.rank])[0], c.answer[1])),
        pc.wrong(
            "narrow_accumulator",
            "every addition rounded to bfloat16, which loses most of a long sum of one sign",
            _narrow_accumulator,
            ("small/column_bias_bf16",),
        ),
    ),
    alternative_solutions=pc.alternatives(
        fp32_rounded_once=lambda case, inputs, rank: _in_float32(inputs, range(case.world_size)),
        products_and_partial_sums_rounded=_rounded_products,
        one_long_sum=_one_long_sum,
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms"), "another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The public benchmark's X_hat has rows of norm 1, which makes d_gamma 30 times too small against d_beta. Here rows have variance "
        "1, and its rows are a case of their own.",
        "The public benchmark judges by its bfloat16 reference, with a fixed tolerance that a correctly rounded answer fails in up to 17 "
        "% of the elements of d_beta. Here the error is allowed to be what rounded products and partial sums make it.",
    ),
)
