"""Problem 45: reduce-scatter of activations (mean over ranks), then RMSNorm of the rows that the rank owns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, reduce_scatter_single, sequential_sum

# Channels of a row for each that is an outlier: shorter rows have none.
_PER_OUTLIER = 1024


def reference(rs_input_1d: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    world = dist.get_world_size()
    mean = rs_input_1d.new_empty(rs_input_1d.numel() // world)
    reduce_scatter_single(mean, rs_input_1d)
    mean /= world
    hidden = mean.view(-1, gamma.numel()).to(torch.float32)
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
    return (hidden * scale * gamma.to(torch.float32)).to(rs_input_1d.dtype)


_SIZE = "|gamma| / R (A + |t| mean(|t| A) / R^2), for the mean t, the mean A of absolute terms and the root R"


def _rows(case: pc.Case) -> int:
    """Rows that a rank owns: ``rows`` (a number, or one by world size), or its share of ``tokens``."""
    if "tokens" in case.params:
        return int(case["tokens"] // case.world_size)
    rows = case["rows"]
    return int(rows[case.world_size] if isinstance(rows, Mapping) else rows)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Rows of unlike size, equal on all ranks (10^case["decades"]), whose mean is 0.3 of their deviation; ranks of unlike size.

    In long rows a few channels, the same on all ranks, make up half of the sum of squares: a sample of the channels does not tell it.

    ``case["pattern"]``: ``outlier`` makes one channel 1000 times as large; ``cancelling`` adds to rank 0 terms 64 times as large that rank
    1 takes away; ``special`` puts a NaN (rank 0) in row 0 and an infinity (last rank) in row 1 of every rank's rows, and makes row 2 zero.
    """
    shape = (case.world_size, _rows(case), case["hidden"])
    low, high = case.params.get("decades", (-0.5, 0.5))
    x = draw.normal(shape, FP32, scale=1.0 + 0.1 * rank, shift=0.3)
    if few := shape[-1] // _PER_OUTLIER:
        places = draw.shared.integers(0, shape[-1], (*shape[:-1], few))
        x.scatter_(-1, places, x.gather(-1, places) * (shape[-1] / few) ** 0.5)
    pattern = case.params.get("pattern")
    if pattern == "outlier":
        x[..., draw.shared.permutation(shape[-1])[:1]] *= 1000.0
    elif pattern == "cancelling":
        x += {0: 64.0, 1: -64.0}.get(rank, 0.0) * draw.shared.normal(shape, FP32)
    x *= 10.0 ** draw.shared.uniform((*shape[:-1], 1), FP32, low=low, high=high)
    if pattern == "special":
        if rank == 0:
            x[:, 0, shape[-1] // 2] = float("nan")
        if rank == case.world_size - 1:
            x[:, 1, shape[-1] // 3] = float("inf")
        x[:, 2] = 0.0
    gamma = draw.shared.normal(shape[-1:], case.params.get("gain_dtype", case.dtype), scale=0.3, shift=1.0)
    return x.view(-1).to(case.dtype), gamma, case["eps"]


def _chunks(case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
    """Every rank's part of the rank's rows, (rows, hidden)."""
    return [args[0].view(case.world_size, _rows(case), case["hidden"])[rank] for args in inputs]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is what an error of the mean t in proportion to A, the mean of absolute terms, can do to the result.

    Directly, and through R, the root: |gamma| / R (A + |t| mean(|t| A) / R^2).
    """
    mean = torch.zeros((_rows(case), case["hidden"]), dtype=FP64, device=inputs[rank][0].device)
    terms = torch.zeros_like(mean)
    for chunk in _chunks(case, inputs, rank):
        wide = chunk.to(FP64) / case.world_size
        mean += wide
        terms += wide.abs_()
    gamma, eps = inputs[rank][1].to(FP64), inputs[rank][2]
    root = torch.sqrt(mean.square().mean(-1, keepdim=True) + eps)
    value = mean / root * gamma
    through_root = mean.abs() * (mean.abs() * terms).mean(-1, keepdim=True) / root.square()
    return pc.Expected("normalised", value, case.dtype, magnitude=gamma.abs() / root * (terms + through_root))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """W - 1 additions, a division and one more for slack in the working dtype, scaled by the oracle's magnitude, and the last rounding.

    In float32 16 u stand for the mean of squares, the root and the products. Normwise, sums in bfloat16 leave 2.4e-3 on 2 ranks and 4.1e-3
    on 8; a row of few elements may have twice as much, and one that an outlier makes up has no norm to speak of.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    if case.dtype == FP32:
        return {"normalised": pc.Tolerance(relative=16 * u, magnitude=(case.world_size + 1) * u, size=_SIZE)}
    normwise, rowwise = (None, None) if case.params.get("pattern") == "outlier" else (1e-2, 2e-2)
    return {"normalised": pc.Tolerance(relative=2 * u, magnitude=(case.world_size + 1) * u, normwise=normwise, rowwise=rowwise, size=_SIZE)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    world, hidden, size = case.world_size, case["hidden"], case.dtype.itemsize
    chunk = _rows(case) * hidden
    port = (world - 1) * chunk * size
    gain_dtype: torch.dtype = case.params.get("gain_dtype", case.dtype)
    return pc.Cost(
        hbm_bytes=(world + 1) * chunk * size + hidden * gain_dtype.itemsize,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": (world + 3) * chunk},
    )


def _normalised(case: pc.Case, gamma_and_eps: tuple[Any, ...], mean: torch.Tensor) -> torch.Tensor:
    """RMSNorm of ``mean`` in float32."""
    gamma, eps = gamma_and_eps
    mean = mean.to(FP32)
    scale = torch.rsqrt(mean.square().mean(-1, keepdim=True) + eps)
    return torch.mul(mean * scale, gamma.to(FP32)).to(case.dtype)


def _wide_mean(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return torch.stack([chunk.to(FP32) for chunk in _chunks(case, inputs, rank)]).sum(0) / case.world_size


def _rounded_once(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return _normalised(case, inputs[rank][1:], _wide_mean(case, inputs, rank))


def _sequential(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    return _normalised(case, inputs[rank][1:], sequential_sum(_chunks(case, inputs, rank)) / case.world_size)


def _sum_instead_of_mean(context: pc.AnswerContext) -> torch.Tensor:
    mean = _wide_mean(context.case, context.inputs, context.rank)
    return _normalised(context.case, context.args[1:], mean * context.case.world_size)


def _every_other_channel(context: pc.AnswerContext) -> torch.Tensor:
    mean = _wide_mean(context.case, context.inputs, context.rank)
    scale = torch.rsqrt(mean[:, ::2].square().mean(-1, keepdim=True) + context.args[2])
    return torch.mul(mean * scale, context.args[1].to(FP32)).to(context.case.dtype)


def _centred(context: pc.AnswerContext) -> torch.Tensor:
    mean = _wide_mean(context.case, context.inputs, context.rank)
    return _normalised(context.case, context.args[1:], mean - mean.mean(-1, keepdim=True))


def _partial(context: pc.AnswerContext, ranks: Sequence[int]) -> torch.Tensor:
    """RMSNorm of the mean in which only some ranks take part."""
    chunks = _chunks(context.case, context.inputs, context.rank)
    total = torch.stack([chunks[q].to(FP32) for q in ranks]).sum(0)
    return _normalised(context.case, context.args[1:], total / context.case.world_size)


def _with(context: pc.AnswerContext, *, gamma: float | None = None, eps: float | None = None) -> torch.Tensor:
    """The right answer to another gain or another eps."""
    _, own_gamma, own_eps = context.args
    other_gamma = own_gamma if gamma is None else torch.full_like(own_gamma, gamma)
    gamma_and_eps = (other_gamma, own_eps if eps is None else eps)
    return _normalised(context.case, gamma_and_eps, _wide_mean(context.case, context.inputs, context.rank))


def _not_normalised(context: pc.AnswerContext) -> torch.Tensor:
    return torch.mul(_wide_mean(context.case, context.inputs, context.rank), context.args[1].to(FP32)).to(context.case.dtype)


def _normalised_first(context: pc.AnswerContext) -> torch.Tensor:
    """The mean of normalised parts, instead of the normalised mean."""
    chunks = _chunks(context.case, context.inputs, context.rank)
    parts = [_normalised(context.case, context.args[1:], chunk).to(FP32) for chunk in chunks]
    return torch.stack(parts).mean(0).to(context.case.dtype)


def _one_statistic(context: pc.AnswerContext) -> torch.Tensor:
    """All rows divided by the root mean square of all of them."""
    mean = _wide_mean(context.case, context.inputs, context.rank)
    scale = torch.rsqrt(torch.nan_to_num(mean, posinf=0.0).square().mean() + context.args[2])
    return torch.mul(mean * scale, context.args[1].to(FP32)).to(context.case.dtype)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"rows": 5, "hidden": 40, "eps": 1e-6, **params})


_LONG_ROWS = ("production_llama3_70b_sp/bf16", "production_llama3_8b_sp/bf16", "production_deepseek_v3_decode/bf16")
_EPS_MATTERS = ("small/large_eps_bf16", "small/decades_bf16", "small/decades_fp32")

PROBLEM = pc.Problem(
    id=45,
    slug="reducescatter_fused_rmsnorm",
    title="Reduce-scatter (mean) and RMSNorm of the owned rows",
    category="tensor_parallel",
    parallelism=("tensor", "sequence"),
    origin="Megatron-LM's boundary between tensor and sequence parallelism: reduce-scatter of a row-parallel layer, then the next norm",
    summary=(
        "rs_input_1d holds W equal chunks of rows of length hidden, the length of gamma. t = the mean over ranks of chunk r, which sums "
        "in the input dtype and a rounded division may give; rank r returns t / sqrt(mean of t^2 over the row + eps) * gamma, computed in "
        "float32 and rounded to the input dtype, (rows, hidden). gamma may have another dtype and is the same on all ranks."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "odd rows, a large eps, rows from tiny to large, an outlier channel, cancellation over ranks, zero, NaN and infinite rows",
            _small("ragged_bf16", BF16, rows=3),
            _small("ragged_fp32", FP32, rows=3),
            _small("empty_bf16", BF16, rows=0),
            _small("large_eps_bf16", BF16, eps=0.5),
            _small("fp32_gain_bf16", BF16, gain_dtype=FP32),
            _small("decades_bf16", BF16, rows=9, eps=1e-3, decades=(-3.0, 1.0)),
            _small("decades_fp32", FP32, rows=9, eps=1e-3, decades=(-3.0, 1.0)),
            _small("large_bf16", BF16, decades=(3.5, 4.5)),
            _small("outlier_bf16", BF16, pattern="outlier"),
            _small("cancelling_fp32", FP32, pattern="cancelling"),
            _small("special_bf16", BF16, pattern="special"),
            _small("special_fp32", FP32, pattern="special"),
        ),
        pc.preset("pkb", "the public benchmark's shapes", pc.case("bf16", BF16, rows={2: 256, 4: 256, 8: 128}, hidden=128, eps=1e-5)),
        pc.preset("production_llama3_70b_sp", "8192 tokens x hidden 8192", pc.case("bf16", BF16, tokens=8192, hidden=8192, eps=1e-5)),
        pc.preset("production_llama3_8b_sp", "4096 tokens x hidden 4096", pc.case("bf16", BF16, tokens=4096, hidden=4096, eps=1e-5)),
        pc.preset("production_deepseek_v3_decode", "512 tokens x hidden 7168", pc.case("bf16", BF16, tokens=512, hidden=7168, eps=1e-6)),
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms")},
    known_wrong_answers=(
        pc.wrong("own_counted_twice", "the rank's own rows added once too often", lambda c: _partial(c, [*c.ranks, c.rank])),
        pc.wrong("not_normalised", "the mean times the gain", _not_normalised),
        pc.wrong("normalised_first", "normalised before the mean over ranks", _normalised_first),
        pc.wrong("one_statistic", "one root mean square for all rows", _one_statistic),
        pc.wrong("every_other_channel", "the mean square of every second channel", _every_other_channel, _LONG_ROWS),
        pc.wrong("centred", "layer norm: the row's mean taken away first", _centred),
        pc.wrong("gain_ignored", "normalised, but not multiplied by the gain", lambda c: _with(c, gamma=1.0)),
        pc.wrong("sum_instead_of_mean", "W times the mean: shows through eps alone", _sum_instead_of_mean, _EPS_MATTERS),
        pc.wrong("epsilon_ignored", "eps = 0: shows in small rows", lambda c: _with(c, eps=0.0), _EPS_MATTERS),
    ),
    alternative_solutions=pc.alternatives(rounded_once=_rounded_once, sequential_in_dtype=_sequential),
    notes=(
        "In the public benchmark eps has no effect, so that a sum over ranks instead of a mean goes unseen, and the rows have no mean, so "
        "that layer norm nearly passes. Here eps matters in some cases, every row has a mean, and long rows have outliers.",
        "The public benchmark judges by its reference, whose sums in bfloat16 are the largest error. Here a wider sum is never wrong.",
        "A zero row gives zeros; an infinite sum gives NaN in its place and zeros in the rest of its row.",
    ),
)
