"""Problem 15: a two-layer SiLU perceptron whose input is sharded by columns and whose output by rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import matmul
from peerlane.problems.families.matmul import ACCUMULATION, BF16, FP32, FP64

# Of the elementwise bound, in unit roundoffs u. One rounding errs by 0.41 u (root mean square), so that this is 14 standard deviations.
_ROUNDINGS = 6


Activation = Callable[[torch.Tensor], torch.Tensor]


def reference(x_local: torch.Tensor, W1: torch.Tensor, W2: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    blocks = x_local.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks)
    rows = torch.cat(received.chunk(world), dim=1)
    return F.silu(rows @ W1) @ W2


def _sizes(case: pc.Case) -> tuple[int, int, int, int]:
    """M, H / W, F, H_out. ``case``: ``rows`` = M or ``rows_per_rank`` = M / W; ``hidden`` = H or ``hidden_per_rank`` = H / W."""
    world = case.world_size
    rows = case["rows"] if "rows" in case.params else case["rows_per_rank"] * world
    local = case["hidden"] // world if "hidden" in case.params else case["hidden_per_rank"]
    return rows, local, case["inner"], case["out"]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of variance 1 / fan-in, so that pre-activations are N(0, scale^2); ``shared_weights``: the same on all ranks.

    X's columns, which cross the wire, differ in size by powers of two (see :meth:`Draw.octaves`), and W1's rows make up for it exactly.
    Patterns are those of :func:`_matmul.activations`, and ``zero_rows``: every third row of X is zero.
    """
    rows, local, inner, out = _sizes(case)
    hidden = local * case.world_size
    x = matmul.activations(case, rank, draw, (rows, local), hidden)
    if (scale := case.params.get("scale", 1.0)) != 1.0:
        x *= scale
    if case.params.get("pattern") == "zero_rows":
        x[::3] = 0.0
    sizes = draw.shared.octaves((hidden,)).to(case.dtype)
    x *= sizes[rank * local : (rank + 1) * local]
    source = draw.shared if case.params.get("shared_weights") else draw
    w1 = matmul.weights(case, source, (hidden, inner), hidden) / sizes.unsqueeze(1)
    return x, w1, matmul.weights(case, source, (inner, out), inner)


def _rows_of(case: pc.Case, rank: int) -> slice:
    count = _sizes(case)[0] // case.world_size
    return slice(rank * count, (rank + 1) * count)


def _x(inputs: pc.Inputs, rows: slice, order: Sequence[int | None] | None = None) -> torch.Tensor:
    """Some rows of X; ``order`` names the rank whose shard goes to each place, None zeros."""
    places = range(len(inputs)) if order is None else order
    return torch.cat([torch.zeros_like(inputs[0][0][rows]) if q is None else inputs[q][0][rows] for q in places], dim=1)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is the standard deviation of the output's rounding errors, in unit roundoffs: see :func:`tolerance`."""
    _, w1, w2 = inputs[rank]
    x = _x(inputs, _rows_of(case, rank)).to(FP64)
    accumulation = ACCUMULATION / (_ROUNDINGS * pc.UNIT_ROUNDOFF[case.dtype])
    w1, w2 = w1.to(FP64), w2.to(FP64)
    z = x @ w1
    gate = torch.sigmoid(z)
    a = z * gate
    slope = gate + a * (1 - gate)
    error = a.square() + (z * slope).square() + (accumulation * slope * (x.abs() @ w1.abs())).square()
    magnitude = (error @ w2.square()).sqrt() + accumulation * (a.abs() @ w2.abs())
    return pc.Expected("output", a @ w2, case.dtype, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Roundings of the pre-activation z, of a = silu(z) and of the output, and accumulation in float32.

    The first two are independent over the inner dimension, so they add up to u sqrt(sum_f (a_f^2 + (z silu'(z))_f^2) W2_f^2) at most, of
    which 6 are allowed. Normwise each rounding costs 0.43 u: together 2.9e-3 in bfloat16.
    """
    rows, _, _, out = _sizes(case)
    normwise = 8e-3 if case.dtype == BF16 and rows // case.world_size * out >= 256 else None
    size = "the root of the sum over f of (a_f^2 + (z silu'(z))_f^2) W2_f^2, for a = silu(z)"
    return {
        "output": pc.Tolerance(
            relative=2 * pc.UNIT_ROUNDOFF[case.dtype], magnitude=_ROUNDINGS * pc.UNIT_ROUNDOFF[case.dtype], normwise=normwise, size=size
        )
    }


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A rank needs its own rows of X only, so that its shard is read once, and 1/W of it goes to every rank."""
    rows, local, inner, out = _sizes(case)
    world, size = case.world_size, case.dtype.itemsize
    own, hidden = rows // world, local * world
    port = (world - 1) * own * local * size
    return pc.Cost(
        hbm_bytes=(rows * local + hidden * inner + inner * out + own * out) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={matmul.FLOP_UNIT[case.dtype]: 2 * own * inner * (hidden + out)},
    )


def _mlp(case: pc.Case, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: Activation = F.silu) -> torch.Tensor:
    """In float32, rounded once."""
    return (activation(x.to(FP32) @ w1.to(FP32)) @ w2.to(FP32)).to(case.dtype)


def _rounded(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Every step rounded to the dtype, the sigmoid too, and the first product summed shard by shard, the rank's own first."""
    _, w1, w2 = inputs[rank]
    world, rows = case.world_size, _rows_of(case, rank)
    shards = w1.to(FP32).chunk(world)
    order = [(rank + step) % world for step in range(world)]
    z = torch.stack([inputs[q][0][rows].to(FP32) @ shards[q] for q in order]).sum(0).to(case.dtype)
    a = z * torch.sigmoid(z)
    return torch.mm(a.to(FP32), w2.to(FP32)).to(case.dtype)


def _other_rows(context: pc.AnswerContext, owner: int) -> torch.Tensor:
    return _mlp(context.case, _x(context.inputs, _rows_of(context.case, owner)), *context.args[1:])


def _other_weights(context: pc.AnswerContext, owner: int) -> torch.Tensor:
    return _mlp(context.case, _x(context.inputs, _rows_of(context.case, context.rank)), *context.inputs[owner][1:])


def _other_activation(activation: Activation) -> Callable[[pc.AnswerContext], torch.Tensor]:
    def answer(context: pc.AnswerContext) -> torch.Tensor:
        _, w1, w2 = context.args
        return _mlp(context.case, _x(context.inputs, _rows_of(context.case, context.rank)), w1, w2, activation)

    return answer


def _summed_over_ranks(context: pc.AnswerContext) -> torch.Tensor:
    """As if W1 and W2 were shards of a larger layer."""
    x = _x(context.inputs, _rows_of(context.case, context.rank))
    return torch.stack([_mlp(context.case, x, *args[1:]).to(FP32) for args in context.inputs]).sum(0).to(context.case.dtype)


def _activation_before_sum(context: pc.AnswerContext) -> torch.Tensor:
    rows, (_, w1, w2) = _rows_of(context.case, context.rank), context.args
    parts = zip(context.inputs, w1.to(FP32).chunk(context.case.world_size), strict=True)
    a = torch.stack([F.silu(args[0][rows].to(FP32) @ shard) for args, shard in parts]).sum(0)
    return torch.mm(a, w2.to(FP32)).to(context.case.dtype)


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"rows_per_rank": 13, "hidden_per_rank": 40, "inner": 24, "out": 17, **params})


PRESETS = (
    pc.preset(
        "small",
        "ragged sizes; saturated, faint and unlike shards; zero rows; weights shared or not; NaN and infinities",
        _small("tile_bf16"),
        _small("ragged_bf16", rows_per_rank=11, hidden_per_rank=33, inner=13, out=11),
        _small("ragged_fp32", FP32, rows_per_rank=5, hidden_per_rank=3, inner=9, out=13),
        _small("tile_fp32", FP32),
        _small("shared_weights_bf16", shared_weights=True),
        _small("saturated_bf16", scale=20.0),
        _small("faint_bf16", scale=0.01),
        _small("rank_scale_bf16", pattern="rank_scale"),
        _small("zero_rows_bf16", pattern="zero_rows"),
        _small("special_bf16", pattern="special"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape; and with activations as saturated as its weights of variance 1 make them",
        pc.case("bf16", BF16, rows=1024, hidden=256, inner=512, out=256),
        pc.case("saturated_bf16", BF16, rows=1024, hidden=256, inner=512, out=256, scale=16.0),
    ),
    pc.preset(
        "production_llama3_8b_mlp",
        "4096 tokens, hidden 4096, inner 14336, one set of weights",
        pc.case("bf16", BF16, rows=4096, hidden=4096, inner=14336, out=4096, shared_weights=True),
    ),
    pc.preset(
        "production_qwen3_1p7b_mlp",
        "16384 tokens, hidden 2048, inner 6144, one set of weights",
        pc.case("bf16", BF16, rows=16384, hidden=2048, inner=6144, out=2048, shared_weights=True),
    ),
    pc.preset(
        "production_vit_g",
        "8192 patches, hidden 1536, inner 4096, another set of weights on every rank",
        pc.case("bf16", BF16, rows=8192, hidden=1536, inner=4096, out=1536),
    ),
)


def _ordinary(case: pc.Case) -> bool:
    """Pre-activations of order one, where activation functions differ most."""
    return case.params.get("scale", 1.0) == 1.0 and case.params.get("pattern") != "rank_scale"


PROBLEM = pc.Problem(
    id=15,
    slug="combined_sharded_gemms",
    title="Two-layer SiLU perceptron: input sharded by columns, output by rows",
    category="tensor_parallel",
    parallelism=("tensor", "sequence"),
    origin="MLP blocks between tensor- and sequence-parallel layouts, as in papers that fuse GEMMs with their collectives (Flux)",
    summary=(
        "x_local (M, H/W) holds columns [r H/W, (r+1) H/W) of X (M, H). Rank r returns silu(X[R] @ W1) @ W2 for its rows "
        "R = [r M/W, (r+1) M/W), shape (M/W, H_out), with its own W1 (H, F) and W2 (F, H_out), which may differ from rank to rank; "
        "silu(z) = z / (1 + exp(-z)). Products are accumulated in float32; z and silu(z) may be rounded to the inputs' dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("first_rows", "rank 0's rows on every rank", lambda c: _other_rows(c, 0)),
        pc.wrong("mirrored_rows", "the rows of rank W - 1 - r", lambda c: _other_rows(c, c.case.world_size - 1 - c.rank)),
        pc.wrong(
            "first_weights", "rank 0's weights on every rank", lambda c: _other_weights(c, 0), lambda c: not c.params.get("shared_weights")
        ),
        pc.wrong("summed_over_ranks", "the sum over ranks of what their weights give", _summed_over_ranks),
        pc.wrong(
            "activation_before_sum",
            "silu of the shards' products instead of silu of their sum: not far off where one shard outweighs the others",
            _activation_before_sum,
            lambda c: c.params.get("scale", 1.0) >= 1.0 and c.params.get("pattern") != "rank_scale",
        ),
        pc.wrong("no_activation", "the two products alone", _other_activation(lambda z: z)),
        pc.wrong("relu", "relu in place of silu", _other_activation(F.relu), _ordinary),
        pc.wrong("gelu", "gelu in place of silu", _other_activation(F.gelu), _ordinary),
    ),
    alternative_solutions=pc.alternatives(
        fp32_rounded_once=lambda case, inputs, rank: _mlp(case, _x(inputs, _rows_of(case, rank)), *inputs[rank][1:]),
        every_step_rounded=_rounded,
    ),
    notes=(
        "The public reference gathers all of X, computes the first layer for all M rows on every rank, and ends with a reduce-scatter that "
        "adds zeros. No sum over ranks is part of the problem. Here the reference exchanges by all-to-all the rows that each rank needs.",
        "Weights have variance 1 / fan-in instead of 1, which would saturate silu and let an absolute tolerance reject correctly rounded "
        "answers. A second pkb case has the public pre-activations of standard deviation 16.",
        "Columns of X differ in size by powers of two, from 1/16 to 16, and the rows of W1 make up for it.",
    ),
    speed_note=(
        "The public one gathers all rows, computes the first layer for all of them on every rank and ends with a reduce-scatter of "
        "zeros; this one exchanges only the rows that a rank needs."
    ),
)
