"""Problem 43: Adam on a shard of the parameters, then an all-gather of what it makes of them."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import training_step
from peerlane.problems.families.collective import BF16, FP32, all_gather_single
from peerlane.problems.families.optimizer import Adam, Flat, Output, Training, adam_update
from peerlane.problems.families.training_step import StepModel


def reference(
    grad_shard: torch.Tensor,
    master_shard: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> torch.Tensor:
    updated, _, _ = adam_update(master_shard, grad_shard, exp_avg, exp_avg_sq, Adam(lr, beta1, beta2, eps, step))
    gathered = master_shard.new_empty(dist.get_world_size() * master_shard.numel())
    all_gather_single(gathered, updated)
    return gathered


def _size(case: pc.Case) -> int:
    """p: ``size``, or the rank's share of ``parameters``."""
    return int(case["size"] if "size" in case.params else case["parameters"] // case.world_size)


def _gradient_dtype(case: pc.Case) -> torch.dtype:
    dtype: torch.dtype = case.params.get("gradient_dtype", case.dtype)
    return dtype


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Parameters N(0, 0.02^2); gradients whose size varies over four decades about 1e-3; moments as earlier gradients of their size leave
    them, see :func:`_training_step.past_moments`. ``case["pattern"]`` changes the shard's first elements:

    * ``still``: no gradient and no second moment; the first two have no first moment either
    * ``huge``: gradients of 1e25, whose squares overflow float32
    * ``nan``: a NaN, as a gradient on rank 0 and as a second moment on the last rank
    """
    size, adam, pattern = _size(case), training_step.adam_of(case), case.params.get("pattern")
    scale = 1e-3 * 10.0 ** draw.uniform((size,), FP32, low=-2.0, high=2.0)
    gradient = draw.normal((size,), FP32) * scale
    parameters = draw.normal((size,), case.dtype, scale=0.02)
    exp_avg, exp_avg_sq = training_step.past_moments(case, draw, size)
    exp_avg *= scale
    exp_avg_sq *= scale.square()
    if pattern == "still":
        gradient[:4] = 0.0
        exp_avg_sq[:4] = 0.0
        exp_avg[:2] = 0.0
    elif pattern == "huge":
        gradient[:4] = torch.copysign(torch.full_like(gradient[:4], 1e25), gradient[:4])
    elif pattern == "nan" and rank == 0:
        gradient[1] = math.nan
    elif pattern == "nan" and rank == case.world_size - 1:
        exp_avg_sq[2] = math.nan
    state = (parameters, exp_avg.to(case.dtype), exp_avg_sq.to(case.dtype))
    return (gradient.to(_gradient_dtype(case)), *state, adam.lr, adam.beta1, adam.beta2, adam.eps, adam.step)


def _training(case: pc.Case, inputs: pc.Inputs) -> Training:
    gradient, parameters, exp_avg, exp_avg_sq = (torch.cat([args[position] for args in inputs]) for position in range(4))
    return Training(Adam(*inputs[0][4:]), parameters, exp_avg, exp_avg_sq, gradient=gradient)


def _outputs(case: pc.Case, rank: int) -> list[Output]:
    return [Output("parameters", 0, 0, (case.world_size * _size(case),))]


MODEL = StepModel(_training, _outputs, single=True)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A dozen operations per parameter of the shard, which is sent to every other rank; the gathered parameters are written."""
    size, world = _size(case), case.world_size
    port = (world - 1) * size * case.dtype.itemsize
    return pc.Cost(
        hbm_bytes=size * (_gradient_dtype(case).itemsize + 3 * case.dtype.itemsize) + world * size * case.dtype.itemsize,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": 12 * size},
    )


def _own_shard_only(context: pc.AnswerContext, old: Training, new: Flat) -> Flat:
    """Other ranks' parameters are gathered before the step."""
    size = _size(context.case)
    own = slice(context.rank * size, (context.rank + 1) * size)
    parameters = old.parameters.to(FP32)
    parameters[own] = new[0][own]
    return parameters, *new[1:]


def _own_shard_repeated(context: pc.AnswerContext, _: Training, new: Flat) -> Flat:
    return new[0].chunk(context.case.world_size)[context.rank].repeat(context.case.world_size), *new[1:]


def _averaged(context: pc.AnswerContext, right: Training) -> Training:
    """The gradient divided by the world size, as if it were a sum over ranks."""
    assert right.gradient is not None
    return replace(right, gradient=right.gradient.to(FP32) / context.case.world_size)


def _last_shard_stale(context: pc.AnswerContext, old: Training, new: Flat) -> Flat:
    parameters = new[0].clone()
    parameters[-_size(context.case) :] = old.parameters[-_size(context.case) :].to(FP32)
    return parameters, *new[1:]


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"size": 37, "lr": 3e-3, "step": 3, **params})


PROBLEM = pc.Problem(
    id=43,
    slug="fused_adam_grad_unshard_allgather",
    title="Adam on a parameter shard, then all-gather of the updated parameters",
    category="fsdp_zero",
    parallelism=("fsdp", "zero"),
    origin="the optimizer step and the gathering of parameters after it, as in FSDP, ZeRO and Megatron-LM's distributed optimizer",
    summary=(
        "On its own shard (p,) the rank takes m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2, and w' = w - lr m' / (1 - "
        "beta1^step) / (sqrt(v' / (1 - beta2^step)) + eps), where w is master_shard and g is already averaged. Every rank returns all "
        "ranks' w' in rank order (W p,), in master_shard's dtype. New moments are not returned, arguments not changed. A v' beyond "
        "float32's range is infinite, and w' then is w."
    ),
    reference=reference,
    inputs=inputs,
    oracle=MODEL.oracle,
    tolerance=MODEL.tolerance,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "odd shards, first and late steps, narrow gradients with wide state, elements without gradient or moments, overflowing "
            "squares, a large eps, unusual betas and learning rate, NaN",
            _small("bf16", BF16, size=101),
            _small("fp32", FP32),
            _small("first_step_fp32", FP32, step=1),
            _small("late_step_fp32", FP32, step=1000),
            _small("bf16_gradient", FP32, gradient_dtype=BF16),
            _small("still_fp32", FP32, pattern="still"),
            _small("huge_bf16", BF16, size=101, pattern="huge"),
            _small("large_eps_fp32", FP32, eps=1e-3),
            _small("nan_fp32", FP32, pattern="nan"),
            _small("unusual_adam_fp32", FP32, beta1=0.8, beta2=0.95, eps=1e-3, lr=0.02),
        ),
        pc.preset("pkb", "the public benchmark's shape: 4096 parameters per rank", pc.case("bf16", BF16, size=4096, lr=1e-3, step=3)),
        pc.preset(
            "production_llama3_8b_block",
            "one transformer block of Llama 3 8B; in bfloat16, and with float32 masters",
            pc.case("bf16", BF16, parameters=218_112_000, lr=3e-4, step=100),
            pc.case("fp32", FP32, parameters=218_112_000, lr=3e-4, step=1000),
        ),
        pc.preset(
            "production_llama3_70b_block",
            "one transformer block of Llama 3 70B",
            pc.case("bf16", BF16, parameters=855_654_400, lr=3e-4, step=100),
        ),
        pc.preset(
            "production_25mib_bucket", "shards of 6.25 MiB: 25 MiB on 4 ranks", pc.case("fp32", FP32, size=1_638_400, lr=3e-4, step=1000)
        ),
    ),
    known_wrong_answers=(
        *training_step.step_wrong_answers(MODEL, moments=False),
        MODEL.wrong("own_shard_only", "other ranks' parameters as they were", state=_own_shard_only),
        MODEL.wrong("own_shard_repeated", "no communication: the rank's own new shard W times", state=_own_shard_repeated),
        MODEL.wrong("last_shard_stale", "the last rank's parameters as they were", state=_last_shard_stale),
        MODEL.wrong("averaged_again", "the gradient divided by the world size", training=_averaged),
        *training_step.usual_wrong_answers(MODEL, lr=3e-3),
    ),
    alternative_solutions=MODEL.alternative_solutions,
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    notes=(
        "In the public benchmark moments are zero and parameters of size one, so that gathering them without any step passes. Here "
        "moments are those of earlier steps, parameters have the size of trained ones, and errors are measured against the update.",
        "A square that overflows is one of a gradient of 1e25, which overflows in any order of the product (1 - beta2) g g.",
        "A gradient narrower than the state may be scaled and squared in its own dtype.",
    ),
)
