"""Problem 40: one data-parallel training step of a two-layer MLP with Adam, from rank 0's state."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import training_step
from peerlane.problems.families.collective import BF16, FP32, wide_sum
from peerlane.problems.families.optimizer import Adam, Output, Training, adam_update, flatten, mlp_gradients, rank_gradients, unflatten
from peerlane.problems.families.training_step import StepModel


def reference(
    X_local: torch.Tensor,
    y_local: torch.Tensor,
    W1: torch.Tensor,
    b1: torch.Tensor,
    W2: torch.Tensor,
    b2: torch.Tensor,
    exp_avg_W1: torch.Tensor,
    exp_avg_b1: torch.Tensor,
    exp_avg_W2: torch.Tensor,
    exp_avg_b2: torch.Tensor,
    exp_avg_sq_W1: torch.Tensor,
    exp_avg_sq_b1: torch.Tensor,
    exp_avg_sq_W2: torch.Tensor,
    exp_avg_sq_b2: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> tuple[torch.Tensor, ...]:
    shapes = [W1.shape, b1.shape, W2.shape, b2.shape]
    state = (
        flatten((W1, b1, W2, b2)),
        flatten((exp_avg_W1, exp_avg_b1, exp_avg_W2, exp_avg_b2)),
        flatten((exp_avg_sq_W1, exp_avg_sq_b1, exp_avg_sq_W2, exp_avg_sq_b2)),
    )
    for tensor in state:
        dist.broadcast(tensor, src=0)
    parameters, exp_avg, exp_avg_sq = state

    gradient = flatten(mlp_gradients(X_local, y_local, unflatten(parameters, shapes)))
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    updated = adam_update(parameters, gradient, exp_avg, exp_avg_sq, Adam(lr, beta1, beta2, eps, step))
    new_parameters, *moments = (unflatten(flat, shapes) for flat in updated)
    return (*(part.requires_grad_() for part in new_parameters), *moments[0], *moments[1])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Batches and state of :mod:`_training_step`. Other ranks' state is one of their own, or all NaN if ``case["others"]`` is ``nan``."""
    count, shapes = training_step.parameter_count(case), training_step.shapes_of(case)
    state = [training_step.draw_parameters(case, draw, 0, count), *training_step.draw_moments(case, draw, 0, count)]
    if rank and case.params.get("others") == "nan":
        state = [torch.full_like(flat, float("nan")) for flat in state]
    adam = training_step.adam_of(case)
    tensors = [part for flat in state for part in unflatten(flat, shapes)]
    return (*training_step.draw_batch(case, rank, draw), *tensors, adam.lr, adam.beta1, adam.beta2, adam.eps, adam.step)


def _training(case: pc.Case, inputs: pc.Inputs, source: int = 0) -> Training:
    """The step from the state of rank ``source``."""
    parameters, exp_avg, exp_avg_sq = (flatten(inputs[source][first : first + 4]) for first in (2, 6, 10))
    return Training(
        Adam(*inputs[source][14:]),
        parameters,
        exp_avg,
        exp_avg_sq,
        batches=[args[:2] for args in inputs],
        shapes=training_step.shapes_of(case),
    )


_PREFIXES = ("", "exp_avg_", "exp_avg_sq_")


def _outputs(case: pc.Case, rank: int) -> list[Output]:
    return [output for source, prefix in enumerate(_PREFIXES) for output in training_step.whole_outputs(case, source, prefix)]


MODEL = StepModel(_training, _outputs)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every rank must learn the parameters and both new moments (the new parameters follow from them), and the ranks' gradients must meet:
    3 P elements into every rank but rank 0, and 4 (W - 1) P in all, here shared equally.
    """
    count, size, world = training_step.parameter_count(case), case.dtype.itemsize, case.world_size
    port = max(3, 4 * (world - 1) / world) * count * size
    return pc.Cost(
        hbm_bytes=training_step.batch_bytes(case, rank) + (3 if rank else 6) * count * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops=training_step.mlp_flops(case, rank),
    )


def _weighted_by_tokens(_: pc.AnswerContext, training: Training) -> Training:
    counts = [x.shape[0] for x, _ in training.batches]
    gradients = rank_gradients(training)
    return replace(training, gradient=wide_sum([n / sum(counts) * g for n, g in zip(counts, gradients, strict=True)]))


PROBLEM = pc.Problem(
    id=40,
    slug="ddp",
    title="Data-parallel training step of a two-layer MLP with Adam",
    category="data_parallel",
    parallelism=("data",),
    origin="data parallelism with flat buffers, as in PyTorch DDP and Apex; the state is broadcast in every step",
    summary=(
        "Parameters and both moments are rank 0's; what other ranks pass has the same shapes and is otherwise ignored. Every rank takes "
        "the gradient of the mean of (relu(X W1^T + b1) W2^T + b2 - y)^2 over all elements of its own batch X (T, d_in), y (T, d_out); g "
        "is the mean of the ranks' gradients, each rank counting the same whatever its T. Then m' = beta1 m + (1 - beta1) g, v' = beta2 v "
        "+ (1 - beta2) g^2, p' = p - lr m' / (1 - beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps). Every rank returns twelve tensors in "
        "the inputs' dtype: W1, b1, W2, b2 (leaves that require a gradient), then their first and their second moments in the same order."
    ),
    reference=reference,
    inputs=inputs,
    oracle=MODEL.oracle,
    tolerance=MODEL.tolerance,
    cost=cost,
    attainable=training_step.known_algorithm("Li et al., PyTorch Distributed, 2020", spread=3.0, sharded=False, gathers=False),
    presets=(
        pc.preset(
            "small",
            "first, early and late steps; unequal batches, NaN in state to be ignored, dead hidden units, a batch without loss, a large "
            "eps, unusual betas, a NaN in a batch",
            training_step.small_case("bf16", BF16, h=16, d_out=16, world_sizes=(2, 4)),
            training_step.small_case("fp32", FP32, step=7),
            training_step.small_case("others_nan_bf16", BF16, h=16, d_out=16, others="nan", world_sizes=(2, 4)),
            training_step.small_case("first_step_fp32", FP32, others="nan", step=1),
            training_step.small_case("late_step_fp32", FP32, step=1000),
            training_step.small_case("unequal_batches_fp32", FP32, tokens_by_rank=(3, 4, 5, 6)),
            training_step.small_case("dead_units_fp32", FP32, pattern="dead"),
            training_step.small_case("zero_loss_fp32", FP32, pattern="zero_loss"),
            training_step.small_case("large_eps_fp32", FP32, eps=0.3),
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
            "production_gpt2_xl_ffn",
            "the MLP of a layer of GPT-2 XL in float32, 2048 tokens per rank",
            pc.case("fp32", FP32, d_in=1600, h=6400, d_out=1600, tokens=2048, lr=2e-4, step=1000),
        ),
    ),
    known_wrong_answers=(
        *training_step.step_wrong_answers(MODEL),
        *training_step.gradient_wrong_answers(MODEL),
        MODEL.wrong(
            "own_state", "no broadcast: every rank's own parameters and moments", training=lambda c, _: _training(c.case, c.inputs, c.rank)
        ),
        MODEL.wrong(
            "weighted_by_tokens",
            "ranks count in proportion to their tokens",
            training=_weighted_by_tokens,
            cases=("small/unequal_batches_fp32",),
        ),
        MODEL.wrong(
            "eps_ignored",
            "nothing added to the root",
            training=lambda _, t: replace(t, adam=replace(t.adam, eps=0.0)),
            cases=("small/large_eps_fp32",),
        ),
        *training_step.usual_wrong_answers(MODEL, lr=0.05),
    ),
    alternative_solutions=MODEL.alternative_solutions,
    excused={
        "neighbours_exchanged": "a sum does not depend on the order of its terms",
        "another_rank": "all ranks have the same answer",
        **training_step.excused_by_nan([prefix + name for prefix in _PREFIXES for name in ("W1", "b1")]),
    },
    replicated=True,
    notes=(
        "In the public benchmark the step is invisible: moments are zero, and at lr 1e-3 no bfloat16 parameter of size one moves by more "
        "than the tolerance, so that parameters left alone pass. Here weights have variance 1 / fan-in, moments are those of earlier "
        "steps with gradients of the present one's size, ranks' batches differ in their targets' means, and errors are measured against "
        "the update.",
        "Other ranks' state is one of their own (or NaN) instead of zeros.",
        "A sum over ranks hardly moves the parameters otherwise than a mean does, for Adam divides by the gradient's size; it shows in "
        "the moments.",
        "The sign of a hidden unit within a rounding error of zero is free; the oracle allows for what such units contribute.",
    ),
)
