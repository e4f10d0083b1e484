"""Problem 47: an FSDP training step of a two-layer MLP with AdamW on flat shards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import optimizer, training_step
from peerlane.problems.families.collective import BF16, FP32, all_gather_single, reduce_scatter_single
from peerlane.problems.families.training_step import StepModel
from peerlane.problems.families.zero import moment_shards, shard_size


def reference(
    X_local: torch.Tensor,
    y_local: torch.Tensor,
    flat_param_shard: torch.Tensor,
    param_shapes: Sequence[tuple[int, ...]],
    exp_avg_shard: torch.Tensor,
    exp_avg_sq_shard: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    world = dist.get_world_size()
    parameters = flat_param_shard.new_empty(world * flat_param_shard.numel())
    all_gather_single(parameters, flat_param_shard)
    gradient = optimizer.flatten(optimizer.mlp_gradients(X_local, y_local, optimizer.unflatten(parameters, param_shapes)))
    average = torch.empty_like(flat_param_shard)
    reduce_scatter_single(average, gradient)
    average /= world
    adam = optimizer.Adam(lr, beta1, beta2, eps, step, weight_decay)
    return optimizer.adam_update(flat_param_shard, average, exp_avg_shard, exp_avg_sq_shard, adam)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Batches and shards of the state of :mod:`_training_step`; every rank draws its own shards."""
    size, adam = shard_size(case), training_step.adam_of(case)
    x, y = training_step.draw_batch(case, rank, draw)
    parameters = training_step.draw_parameters(case, draw, rank * size, (rank + 1) * size)
    exp_avg, exp_avg_sq = moment_shards(case, rank, draw)
    return (
        x,
        y,
        parameters,
        list(training_step.shapes_of(case)),
        exp_avg,
        exp_avg_sq,
        *(adam.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.step),
    )


def _training(case: pc.Case, inputs: pc.Inputs) -> optimizer.Training:
    lr, beta1, beta2, eps, weight_decay, step = inputs[0][6:]
    parameters, exp_avg, exp_avg_sq = (torch.cat([args[position] for args in inputs]) for position in (2, 4, 5))
    return optimizer.Training(
        optimizer.Adam(lr, beta1, beta2, eps, step, weight_decay),
        parameters,
        exp_avg,
        exp_avg_sq,
        batches=[args[:2] for args in inputs],
        shapes=inputs[0][3],
    )


def _outputs(case: pc.Case, rank: int) -> list[optimizer.Output]:
    size = shard_size(case)
    names = ("flat_param_shard", "exp_avg_shard", "exp_avg_sq_shard")
    return [optimizer.Output(name, source, rank * size, (size,)) for source, name in enumerate(names)]


MODEL = StepModel(_training, _outputs)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """An all-gather of the parameters and a reduce-scatter of the gradients; state is read and written."""
    count, size, world = training_step.parameter_count(case), case.dtype.itemsize, case.world_size
    port = pc.traffic.all_reduce(count * size, world)
    return pc.Cost(
        hbm_bytes=training_step.batch_bytes(case, rank) + 6 * shard_size(case) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops=training_step.mlp_flops(case, rank),
    )


def _own_shard_elsewhere_zero(context: pc.AnswerContext, right: optimizer.Training) -> optimizer.Training:
    """The gradient where parameters of other ranks' shards are taken for zero; the step from the right state."""
    size = shard_size(context.case)
    own = slice(context.rank * size, (context.rank + 1) * size)
    known = torch.zeros_like(right.parameters)
    known[own] = right.parameters[own]
    gradients = _gradients(replace(right, parameters=known))
    return replace(right, gradient=gradients)


def _gradients(training: optimizer.Training) -> torch.Tensor:
    return torch.stack(optimizer.rank_gradients(training)).mean(0)


def _next_shards(context: pc.AnswerContext, right: optimizer.Training) -> optimizer.Training:
    """The rank's state is stepped with the next rank's slice of the gradient."""
    return replace(right, gradient=_gradients(right).roll(-shard_size(context.case)))


def _coupled_decay(_: pc.AnswerContext, right: optimizer.Training) -> optimizer.Training:
    """L2 regularisation: the decay is part of the gradient."""
    decay = right.adam.weight_decay * right.parameters.to(FP32)
    return replace(right, gradient=_gradients(right) + decay, adam=replace(right.adam, weight_decay=0.0))


def _decay_without_rate(_: pc.AnswerContext, old: optimizer.Training, new: optimizer.Flat) -> optimizer.Flat:
    return new[0] - (1 - old.adam.lr) * old.adam.weight_decay * old.parameters.to(FP32), *new[1:]


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    # 104 parameters: on 4 ranks shards begin inside b1 and W2, on 8 ranks inside rows of W1.
    return pc.case(label, dtype, **{"d_in": 3, "h": 8, "d_out": 8, "tokens": 3, "lr": 0.05, "step": 2, "weight_decay": 0.3, **params})


_DECAY = ("small/fp32", "small/first_step_fp32", "small/late_step_fp32", "small/large_decay_bf16", "small/dead_units_fp32")

PROBLEM = pc.Problem(
    id=47,
    slug="fsdp_step_e2e",
    title="FSDP training step of a two-layer MLP with AdamW on flat shards",
    category="fsdp_zero",
    parallelism=("fsdp", "data"),
    origin="fully sharded data parallelism with flat parameters, as in PyTorch FSDP",
    summary=(
        "Ranks hold equal shards (p,) of one flat vector: W1 (h, d_in), b1, W2 (d_out, h), b2, whose shapes are param_shapes, each "
        "row-major and in rank order; and equal shards of both moments. The gradient g is the mean over ranks of the gradients of the "
        "mean of (relu(X W1^T + b1) W2^T + b2 - y)^2 over all elements of a rank's own batch X (T, d_in), y (T, d_out). Then m' = beta1 m "
        "+ (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2, p' = p - lr m' / (1 - beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps) - lr "
        "weight_decay p. Every rank returns its own shards of p', m' and v', in the inputs' dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=MODEL.oracle,
    tolerance=MODEL.tolerance,
    cost=cost,
    attainable=training_step.known_algorithm("Zhao et al., PyTorch FSDP, 2023", gathers=False),
    presets=(
        pc.preset(
            "small",
            "first, early and late steps; weight decay from none to large; shards that begin inside a bias or a row, and of unlike scale; "
            "dead hidden units, which decay and old moments alone move; a NaN in a batch; unusual betas and eps",
            _small("bf16", BF16, h=16, d_out=16, world_sizes=(2, 4)),
            _small("fp32", FP32, step=7),
            _small("first_step_fp32", FP32, step=1),
            _small("late_step_fp32", FP32, step=1000),
            _small("no_decay_fp32", FP32, weight_decay=0.0),
            _small("large_decay_bf16", BF16, h=16, d_out=16, weight_decay=10.0),
            _small("unlike_shards_fp32", FP32, shard_base=30.0),
            _small("dead_units_fp32", FP32, pattern="dead"),
            _small("nan_bf16", BF16, h=16, d_out=16, pattern="nan"),
            _small("wide_bf16", BF16, d_in=24, h=40, d_out=16, tokens=32, lr=0.01, step=3),
            _small("unusual_adam_fp32", FP32, beta1=0.95, beta2=0.99, eps=0.3, lr=0.02, step=3, weight_decay=1.0),
        ),
        pc.preset(
            "pkb",
            "the public benchmark's shape: 262912 parameters, 1024 tokens over all ranks",
            pc.case("bf16", BF16, d_in=256, h=512, d_out=256, tokens_total=1024, lr=1e-3, step=3, weight_decay=0.01),
        ),
        pc.preset(
            "production_bert_large_ffn",
            "the MLP of a layer of BERT large, 4096 tokens per rank",
            pc.case("bf16", BF16, d_in=1024, h=4096, d_out=1024, tokens=4096, lr=1e-3, step=3, weight_decay=0.01),
        ),
        pc.preset(
            "production_llama3_8b_ffn",
            "an MLP of the size of Llama 3 8B's, 4096 tokens per rank",
            pc.case("bf16", BF16, d_in=4096, h=14336, d_out=4096, tokens=4096, lr=1e-3, step=3, weight_decay=0.1),
        ),
        pc.preset(
            "production_llama3_70b_ffn",
            "an MLP of the size of Llama 3 70B's, 2048 tokens per rank",
            pc.case("bf16", BF16, d_in=8192, h=28672, d_out=8192, tokens=2048, lr=1e-3, step=3, weight_decay=0.1),
        ),
    ),
    known_wrong_answers=(
        *training_step.step_wrong_answers(MODEL),
        *training_step.gradient_wrong_answers(MODEL),
        MODEL.wrong("others_parameters_zero", "no gathering: other ranks' parameters taken for zero", training=_own_shard_elsewhere_zero),
        MODEL.wrong("next_shards_gradient", "shards stepped with the next rank's slice of the gradient", training=_next_shards),
        MODEL.wrong(
            "no_decay", "weight decay left out", training=lambda _, t: replace(t, adam=replace(t.adam, weight_decay=0.0)), cases=_DECAY
        ),
        MODEL.wrong("coupled_decay", "weight decay added to the gradient", training=_coupled_decay, cases=_DECAY),
        MODEL.wrong("decay_without_rate", "weight decay not scaled by lr", state=_decay_without_rate, cases=_DECAY),
        *training_step.usual_wrong_answers(MODEL, lr=0.05, weight_decay=0.3),
    ),
    alternative_solutions=MODEL.alternative_solutions,
    notes=(
        "In the public benchmark all shards but rank 0's are zero, by a mistake of its generator, and so are all moments: returning the "
        "arguments passes. Here all shards are drawn, weights have variance 1 / fan-in, moments are those of earlier steps with gradients "
        "of the present one's size, ranks' batches differ in their targets' means, and errors are measured against the update.",
        "At the public lr and weight decay the decay is far below bfloat16's resolution; it is tested in small cases.",
        "A sum over ranks hardly moves the parameters otherwise than a mean does, for Adam divides by the gradient's size; it shows in "
        "the moments.",
        "The sign of a hidden unit within a rounding error of zero is free; the oracle allows for what such units contribute.",
    ),
)
