"""What problems 41 and 42 share: everything but the reference, for only the path of the gradient's own slice differs."""

from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import training_step
from peerlane.problems.families.collective import BF16, FP32
from peerlane.problems.families.optimizer import NAMES, Adam, Flat, Output, Training, flatten, unflatten
from peerlane.problems.families.training_step import StepModel


def shard_size(case: pc.Case) -> int:
    """p = P / W; P must be a multiple of W."""
    count = training_step.parameter_count(case)
    if count % case.world_size:
        raise ValueError(f"{case.key}: {count} parameters on {case.world_size} ranks: expected a multiple of the number of ranks")
    return count // case.world_size


def moment_shards(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's shards of both moments; ``case["shard_base"]``: the second ones are this much larger from rank to rank."""
    size = shard_size(case)
    exp_avg, exp_avg_sq = training_step.draw_moments(case, draw, rank * size, (rank + 1) * size)
    return exp_avg, exp_avg_sq * case.params.get("shard_base", 1.0) ** rank


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Batches and state of :mod:`_training_step`. Other ranks' parameters are their own, or all NaN if ``case["others"]`` is ``nan``."""
    parameters = training_step.draw_parameters(case, draw, 0, training_step.parameter_count(case))
    if rank and case.params.get("others") == "nan":
        parameters.fill_(float("nan"))
    adam = training_step.adam_of(case)
    return (
        *training_step.draw_batch(case, rank, draw),
        *unflatten(parameters, training_step.shapes_of(case)),
        *moment_shards(case, rank, draw),
        *(adam.lr, adam.beta1, adam.beta2, adam.eps, adam.step),
    )


def training(case: pc.Case, inputs: pc.Inputs, source: int = 0) -> Training:
    """The step from the parameters of rank ``source`` and all ranks' moments."""
    return Training(
        Adam(*inputs[0][8:]),
        flatten(inputs[source][2:6]),
        torch.cat([args[6] for args in inputs]),
        torch.cat([args[7] for args in inputs]),
        batches=[args[:2] for args in inputs],
        shapes=training_step.shapes_of(case),
    )


def outputs(case: pc.Case, rank: int) -> list[Output]:
    """All parameters, and the rank's shard of the moments."""
    size = shard_size(case)
    shards = [Output(name, source, rank * size, (size,)) for source, name in ((1, "exp_avg_part"), (2, "exp_avg_sq_part"))]
    return [*training_step.whole_outputs(case, 0), *shards]


MODEL = StepModel(training, outputs)
ALGORITHM = training_step.known_algorithm("Rajbhandari et al., ZeRO, 2020", spread=1.0)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Rank 0's parameters go to all others, ranks' gradients meet, and new parameters go from a shard's owner, who alone has its moments,
    to all others: 3 (W - 1) P elements in all, here shared equally; and no less than 2 P into every rank but rank 0.
    """
    count, size, world = training_step.parameter_count(case), case.dtype.itemsize, case.world_size
    port = max(2, 3 * (world - 1) / world) * count * size
    return pc.Cost(
        hbm_bytes=training_step.batch_bytes(case, rank) + ((1 if rank else 2) * count + 4 * shard_size(case)) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops=training_step.mlp_flops(case, rank),
    )


PRESETS = (
    pc.preset(
        "small",
        "first, early and late steps; shards that begin inside a bias or a row, and of unlike scale; NaN in parameters to be ignored; "
        "dead hidden units, gradients that cancel between ranks, a NaN in a batch, unusual betas and eps",
        training_step.small_case("bf16", BF16, h=16, d_out=16, world_sizes=(2, 4)),
        training_step.small_case("fp32", FP32, step=7),
        training_step.small_case("others_nan_bf16", BF16, h=16, d_out=16, others="nan", world_sizes=(2, 4)),
        training_step.small_case("first_step_fp32", FP32, others="nan", step=1),
        training_step.small_case("late_step_fp32", FP32, step=1000),
        training_step.small_case("unlike_shards_fp32", FP32, shard_base=30.0),
        training_step.small_case("dead_units_fp32", FP32, pattern="dead"),
        training_step.small_case("cancelling_bf16", BF16, h=16, d_out=16, pattern="cancelling", tokens=16, step=3, world_sizes=(2, 4)),
        training_step.small_case("nan_bf16", BF16, h=16, d_out=16, pattern="nan"),
        training_step.small_case("wide_bf16", BF16, d_in=24, h=40, d_out=16, tokens=32, lr=0.01, step=3),
        training_step.small_case("unusual_adam_fp32", FP32, beta1=0.95, beta2=0.99, eps=0.3, lr=0.02, step=3),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 262912 parameters, 1024 tokens over all ranks",
        pc.case("bf16", BF16, d_in=256, h=512, d_out=256, tokens_total=1024, lr=1e-3, step=3),
    ),
    pc.preset(
        "production_bert_large_ffn",
        "the MLP of a layer of BERT large, 4096 tokens per rank",
        pc.case("bf16", BF16, d_in=1024, h=4096, d_out=1024, tokens=4096, lr=1e-3, step=3),
    ),
    pc.preset(
        "production_llama3_8b_ffn",
        "an MLP of the size of Llama 3 8B's, 4096 tokens per rank",
        pc.case("bf16", BF16, d_in=4096, h=14336, d_out=4096, tokens=4096, lr=1e-3, step=3),
    ),
    pc.preset(
        "production_llama3_70b_ffn",
        "an MLP of the size of Llama 3 70B's, 2048 tokens per rank",
        pc.case("bf16", BF16, d_in=8192, h=28672, d_out=8192, tokens=2048, lr=1e-3, step=3),
    ),
)


def _own_slice_only(context: pc.AnswerContext, old: Training, new: Flat) -> Flat:
    size = shard_size(context.case)
    own = slice(context.rank * size, (context.rank + 1) * size)
    parameters = old.parameters.to(FP32)
    parameters[own] = new[0][own]
    return parameters, *new[1:]


def _slices_reversed(context: pc.AnswerContext, old: Training, new: Flat) -> Flat:
    return torch.cat(new[0].chunk(context.case.world_size)[::-1]), *new[1:]


def _next_shards_moments(context: pc.AnswerContext, right: Training) -> Training:
    size = shard_size(context.case)
    return Training(
        right.adam, right.parameters, right.exp_avg.roll(-size), right.exp_avg_sq.roll(-size), batches=right.batches, shapes=right.shapes
    )


WRONG_ANSWERS: tuple[pc.KnownWrongAnswer, ...] = (
    *training_step.step_wrong_answers(MODEL),
    *training_step.gradient_wrong_answers(MODEL),
    MODEL.wrong("own_parameters", "no broadcast: every rank's own parameters", training=lambda c, _: training(c.case, c.inputs, c.rank)),
    MODEL.wrong("own_slice_only", "no gathering: parameters of other ranks' shards as they were", state=_own_slice_only),
    MODEL.wrong("slices_reversed", "new parameters gathered from the last rank to the first", state=_slices_reversed),
    MODEL.wrong("next_shards_moments", "shards taken with the next rank's moments", training=_next_shards_moments),
    *training_step.usual_wrong_answers(MODEL, lr=0.05),
)

EXCUSED = {
    **{f"another_rank/{name}": "all ranks have the same parameters" for name in NAMES},
    **training_step.excused_by_nan(["W1", "b1"]),
}

SUMMARY = (
    "Parameters are rank 0's; what other ranks pass is ignored but for shapes. Their flat order is W1, b1, W2, b2, each row-major, of "
    "length P = p W; rank r owns positions [r p, (r + 1) p) and passes its own shards of both moments (p,). The gradient g is the mean "
    "over ranks of the gradients of the mean of (relu(X W1^T + b1) W2^T + b2 - y)^2 over all elements of a rank's own batch X (T, d_in), "
    "y (T, d_out). Then m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2, p' = p - lr m' / (1 - beta1^step) / (sqrt(v' / (1 - "
    "beta2^step)) + eps). Every rank returns W1, b1, W2, b2 whole and updated, and its own shards of m' and v', in the inputs' dtype. "
)

NOTES = (
    "In the public benchmark the step is invisible: moments are zero, and parameters left alone pass. Here weights have variance 1 / "
    "fan-in, moments are those of earlier steps with gradients of the present one's size, ranks' batches differ in their targets' means, "
    "and errors are measured against the update.",
    "Other ranks' parameters are their own (or NaN) instead of zeros.",
    "A sum over ranks hardly moves the parameters otherwise than a mean does, for Adam divides by the gradient's size; it shows in the "
    "moments.",
    "The sign of a hidden unit within a rounding error of zero is free; the oracle allows for what such units contribute.",
)
