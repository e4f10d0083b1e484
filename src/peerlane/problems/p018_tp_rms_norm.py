"""Problem 18: RMSNorm over a hidden dimension that is sharded across ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64

# Channels of a row for each that is an outlier, beyond the first.
_PER_OUTLIER = 256


def reference(local_hidden_states: torch.Tensor, local_weight: torch.Tensor, variance_epsilon: float) -> torch.Tensor:
    hidden = local_hidden_states.to(torch.float32)
    variance = hidden.square().sum(-1, keepdim=True)
    dist.all_reduce(variance)
    variance /= hidden.shape[-1] * dist.get_world_size()
    normalised = hidden * torch.rsqrt(variance + variance_epsilon)
    return normalised.to(local_hidden_states.dtype) * local_weight


def _shape(case: pc.Case) -> tuple[int, ...]:
    """(..., H_local): ``hidden`` is divided by the world size, ``local`` is not."""
    return (*case["rows"], case["local"] if "local" in case.params else case["hidden"] // case.world_size)


def _weight_dtype(case: pc.Case) -> torch.dtype:
    dtype: torch.dtype = case.params.get("weight_dtype", case.dtype)
    return dtype


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Rows of unlike size, equal on all ranks (10^-1 to 10, or 10^case["decades"]), and ranks of unlike size (1.25^r, or rank_base^r).

    In every row a few channels, at places of their own, make up half of the sum of squares: neither a sample of the channels nor one
    rank's part of them tells it. ``outliers``: the last rank alone has channels 1000 times as large. ``extreme``: row 0 is zero, the
    squares of row 1 are denormal and those of row 2 too large for float32, and rank 0 has a NaN in row 3.
    """
    shape = _shape(case)
    low, high = case.params.get("decades", (-1.0, 1.0))
    row_scale = 10.0 ** draw.shared.uniform((*shape[:-1], 1), FP32, low=low, high=high)
    hidden = draw.normal(shape, FP32, scale=case.params.get("rank_base", 1.25) ** rank) * row_scale
    few = 1 + shape[-1] // _PER_OUTLIER
    places = draw.integers(0, shape[-1], (*shape[:-1], few))
    hidden.scatter_(-1, places, hidden.gather(-1, places) * (shape[-1] / few) ** 0.5)
    if case.params.get("outliers") and rank == case.world_size - 1:
        hidden[..., draw.permutation(shape[-1])[: -(-shape[-1] // 16)]] *= 1000.0
    if case.params.get("extreme"):
        rows = hidden.view(-1, shape[-1])
        rows[0] = 0.0
        rows[1] *= 1e-20
        rows[2] *= 1e20
        if rank == 0:
            rows[3, shape[-1] // 2] = float("nan")
    weight = draw.normal(shape[-1:], _weight_dtype(case), scale=0.1, shift=1.0)
    return hidden.to(case.dtype), weight, case["eps"]


def _normalise(case: pc.Case, args: tuple[Any, ...], square_sum: torch.Tensor, count: int, work: torch.dtype) -> torch.Tensor:
    """x rsqrt(square_sum / count + eps) w in ``work``, not rounded."""
    hidden, weight = (tensor.to(work) for tensor in args[:2])
    return torch.mul(hidden * torch.rsqrt(square_sum / count + args[2]), weight)


def _square_sum(inputs: pc.Inputs, work: torch.dtype) -> torch.Tensor:
    return torch.stack([args[0].to(work).square().sum(-1, keepdim=True) for args in inputs]).sum(0)


def _count(case: pc.Case) -> int:
    return _shape(case)[-1] * case.world_size


def _answer_dtype(case: pc.Case) -> torch.dtype:
    return torch.promote_types(case.dtype, _weight_dtype(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """In float64, except that a sum of squares beyond float32's range is infinite, and the row zero, as squares in float32 have it."""
    total = _square_sum(inputs, FP64)
    total = total.masked_fill(total > torch.finfo(FP32).max, float("inf"))
    return pc.Expected("normalised", _normalise(case, inputs[rank], total, _count(case), FP64), _answer_dtype(case))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Two roundings to the inputs' dtype and half of one for rounded sums, the rest for slack; in float32, 16 u for sums and products."""
    return {"normalised": pc.Tolerance(relative=(16 if case.dtype == FP32 else 3) * pc.UNIT_ROUNDOFF[case.dtype])}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """One float32 per row is all-reduced; a direct exchange with every peer would send W / 2 times as much, and is quicker when few."""
    *leading, local = _shape(case)
    rows, world = torch.Size(leading).numel(), case.world_size
    port = pc.traffic.all_reduce(rows * FP32.itemsize, world)
    moved = rows * local * (case.dtype.itemsize + _answer_dtype(case).itemsize)
    return pc.Cost(
        hbm_bytes=moved + local * _weight_dtype(case).itemsize, egress_bytes=port, ingress_bytes=port, flops={"fp32": 4 * rows * local}
    )


def _from_statistics(context: pc.AnswerContext, ranks: Sequence[int], count: int) -> torch.Tensor:
    """What comes out if only some ranks' squares are summed and divided by ``count``."""
    square_sum = _square_sum([context.inputs[q] for q in ranks], FP32)
    return _normalise(context.case, context.args, square_sum, count, FP32).to(_answer_dtype(context.case))


def _divided_by_local_width(context: pc.AnswerContext) -> torch.Tensor:
    return _from_statistics(context, context.ranks, _shape(context.case)[-1])


def _every_other_channel(context: pc.AnswerContext) -> torch.Tensor:
    means = [args[0].to(FP32)[..., ::2].square().mean(-1, keepdim=True) for args in context.inputs]
    return _normalise(context.case, context.args, torch.stack(means).mean(0), 1, FP32).to(_answer_dtype(context.case))


def _gain_ignored(context: pc.AnswerContext) -> torch.Tensor:
    return _fp32_once(context.case, [(x, torch.ones_like(w), eps) for x, w, eps in context.inputs], context.rank)


def _epsilon_outside_root(context: pc.AnswerContext) -> torch.Tensor:
    hidden, weight = (tensor.to(FP32) for tensor in context.args[:2])
    root = torch.sqrt(_square_sum(context.inputs, FP32) / _count(context.case))
    return torch.mul(hidden / (root + context.args[2]), weight).to(_answer_dtype(context.case))


def _fp32_once(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    square_sum = _square_sum(inputs, FP32)
    return _normalise(case, inputs[rank], square_sum, _count(case), FP32).to(_answer_dtype(case))


def _mean_of_means(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    means = [args[0].to(FP32).square().mean(-1, keepdim=True) for args in inputs]
    return _normalise(case, inputs[rank], torch.stack(means).mean(0), 1, FP32).to(_answer_dtype(case))


def _rounded_sums(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Each rank's sum of squares travels in the inputs' dtype."""
    sums = [args[0].to(FP32).square().sum(-1, keepdim=True).to(case.dtype).to(FP32) for args in inputs]
    return _normalise(case, inputs[rank], torch.stack(sums).sum(0), _count(case), FP32).to(_answer_dtype(case))


PROBLEM = pc.Problem(
    id=18,
    slug="tp_rms_norm",
    title="RMSNorm over a sharded hidden dimension",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="RMSNorm with Llama's numerics under tensor parallelism: the query and key norms of MiniMax and OLMo-2 layers in vLLM",
    summary=(
        "The rank holds (..., H/W) of a hidden dimension H in equal shards. v = mean over H of x^2, in float32, where ranks may "
        "send their sums rounded to the input dtype; y = x rsqrt(v + eps) rounded to that dtype, times local_weight (H/W,). The result has "
        "the promoted dtype of input and weight."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_llama3_70b_packed",
    presets=(
        pc.preset(
            "small",
            "ragged rows, rows and ranks of unlike scale, outliers on one rank, a float32 gain, zero, tiny, huge and NaN rows",
            pc.case("ragged_bf16", BF16, rows=(5,), local=7, eps=1e-6),
            pc.case("ragged_fp32", FP32, rows=(5,), local=7, eps=1e-6),
            pc.case("leading_axes_bf16", BF16, rows=(2, 3), local=8, eps=1e-6),
            pc.case("decades_bf16", BF16, rows=(33,), local=16, eps=1e-2, decades=(-3.0, 3.0)),
            pc.case("decades_fp32", FP32, rows=(33,), local=16, eps=1e-2, decades=(-3.0, 3.0)),
            pc.case("rank_scale_bf16", BF16, rows=(33,), local=16, eps=1e-6, rank_base=10.0),
            pc.case("fp32_weight_bf16", BF16, rows=(33,), local=16, eps=1e-6, weight_dtype=FP32),
            pc.case("outliers_bf16", BF16, rows=(33,), local=16, eps=1e-6, outliers=True),
            pc.case("extreme_bf16", BF16, rows=(9,), local=16, eps=1e-6, extreme=True),
            pc.case("extreme_fp32", FP32, rows=(9,), local=16, eps=1e-6, extreme=True),
        ),
        pc.preset(
            "pkb", "the public benchmark's shape: 1024 columns on every rank", pc.case("bf16", BF16, rows=(1024,), local=1024, eps=1e-5)
        ),
        pc.preset("production_llama3_70b_prefill", "8192 tokens x hidden 8192", pc.case("bf16", BF16, rows=(8192,), hidden=8192, eps=1e-5)),
        pc.preset(
            "production_minimax_m2_qk_norm",
            "query norm of 4096 tokens x 6144, and key norm x 1024",
            pc.case("query_bf16", BF16, rows=(4096,), hidden=6144, eps=1e-6),
            pc.case("key_bf16", BF16, rows=(4096,), hidden=1024, eps=1e-6),
        ),
        pc.preset(
            "production_llama3_70b_packed", "32768 tokens x hidden 8192", pc.case("bf16", BF16, rows=(32768,), hidden=8192, eps=1e-5)
        ),
        pc.preset(
            "production_llama3_70b_decode", "64 tokens x hidden 8192: latency", pc.case("bf16", BF16, rows=(64,), hidden=8192, eps=1e-5)
        ),
    ),
    excused={"neighbours_exchanged": "a sum does not depend on the order of its terms"},
    known_wrong_answers=(
        pc.wrong("not_normalised", "the hidden states times the gain", lambda c: torch.mul(*c.args[:2])),
        pc.wrong(
            "local_statistics", "normalised with the rank's own mean square", lambda c: _from_statistics(c, [c.rank], _shape(c.case)[-1])
        ),
        pc.wrong("divided_by_local_width", "the sum over all ranks divided by the local width", _divided_by_local_width),
        pc.wrong("every_other_channel", "the mean square of every second channel", _every_other_channel),
        pc.wrong("gain_ignored", "normalised, but not multiplied by the gain", _gain_ignored),
        pc.wrong(
            "epsilon_ignored",
            "eps = 0: shows in small rows",
            lambda c: _fp32_once(c.case, [(x, w, 0.0) for x, w, _ in c.inputs], c.rank),
            ("small/decades_bf16", "small/decades_fp32", "small/extreme_bf16", "small/extreme_fp32"),
        ),
        pc.wrong(
            "epsilon_outside_root",
            "x / (sqrt(v) + eps): shows in small rows",
            _epsilon_outside_root,
            ("small/decades_bf16", "small/decades_fp32", "small/extreme_bf16", "small/extreme_fp32"),
        ),
    ),
    alternative_solutions=pc.alternatives(rounded_once=_fp32_once, mean_of_means=_mean_of_means, rounded_sums=_rounded_sums),
    notes=(
        "The public benchmark's rows all have mean square one, so that leaving out the normalisation nearly passes. Here rows and ranks "
        "differ in size, rows have outliers, as those of trained models, and the gain is near one, as trained gains are.",
        "Squares are float32 by definition: a row whose sum of squares overflows float32 is zero.",
        "The sizes of the MiniMax preset are approximate.",
    ),
)
