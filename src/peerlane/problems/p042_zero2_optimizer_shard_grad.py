"""Problem 42: a ZeRO-2 training step of a two-layer MLP: gradients reduce-scattered, optimizer state sharded."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import zero
from peerlane.problems.families.collective import all_gather_single, reduce_scatter_single
from peerlane.problems.families.optimizer import NAMES, Adam, adam_update, flatten, mlp_gradients, unflatten


def reference(
    X_local: torch.Tensor,
    y_local: torch.Tensor,
    W1: torch.Tensor,
    b1: torch.Tensor,
    W2: torch.Tensor,
    b2: torch.Tensor,
    exp_avg_part: torch.Tensor,
    exp_avg_sq_part: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> tuple[torch.Tensor, ...]:
    world, size = dist.get_world_size(), exp_avg_part.numel()
    shapes = [W1.shape, b1.shape, W2.shape, b2.shape]
    parameters = flatten((W1, b1, W2, b2))
    if parameters.numel() != size * world:
        raise ValueError(f"got {parameters.numel()} parameters and shards of {size} on {world} ranks: expected {size * world} parameters")
    dist.broadcast(parameters, src=0)

    gradient = flatten(mlp_gradients(X_local, y_local, unflatten(parameters, shapes)))
    average = gradient.new_empty(size)
    reduce_scatter_single(average, gradient)
    average /= world
    own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    part, exp_avg, exp_avg_sq = adam_update(parameters[own], average, exp_avg_part, exp_avg_sq_part, Adam(lr, beta1, beta2, eps, step))
    all_gather_single(parameters, part)
    return (*unflatten(parameters, shapes), exp_avg, exp_avg_sq)


PROBLEM = pc.Problem(
    id=42,
    slug="zero2_optimizer_shard_grad",
    title="ZeRO-2 training step of a two-layer MLP: gradients and optimizer state sharded",
    category="fsdp_zero",
    parallelism=("zero", "data"),
    origin="ZeRO stage 2 of DeepSpeed",
    summary=zero.SUMMARY + "The gradient may be reduced in any way.",
    reference=reference,
    inputs=zero.inputs,
    oracle=zero.MODEL.oracle,
    tolerance=zero.MODEL.tolerance,
    cost=zero.cost,
    attainable=zero.ALGORITHM,
    presets=zero.PRESETS,
    known_wrong_answers=zero.WRONG_ANSWERS,
    alternative_solutions=zero.MODEL.alternative_solutions,
    excused=zero.EXCUSED,
    replicated=NAMES,
    notes=(
        *zero.NOTES,
        "The public benchmark's 41 and 42 are one task to an optimiser; ours too, but for the reference: it scatters the reduced "
        "gradients.",
    ),
)
