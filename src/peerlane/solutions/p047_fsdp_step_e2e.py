"""Problem 47, a sharded training step of a two-layer MLP: parameters are gathered, and one kernel sums gradients and updates the own part.

The first matrix of the gradient travels while the other one is computed. The public shape is bound by launches; larger ones by the
products, and by the links before them. The kernel is ``families/training_step.py``."""

from collections.abc import Sequence

import torch

from peerlane.device import group_of
from peerlane.solutions.families.training_step import Adam, adam_step, mlp_gradient, spread_parts, step_of, unflatten


def solution(
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
    group = group_of()
    step_here = step_of(group, flat_param_shard.numel(), flat_param_shard.dtype, "parts")
    # The last call's update began behind a barrier that all ranks came to with their gradients, hence with the parameters read.
    weights = unflatten(spread_parts(group, flat_param_shard), param_shapes)
    gradient, copied = mlp_gradient(group, X_local, y_local, weights, step_here)
    state = [(flat_param_shard.contiguous(), exp_avg_shard.contiguous(), exp_avg_sq_shard.contiguous())]
    return adam_step(step_here, gradient, copied, state, Adam(lr, beta1, beta2, eps, step, weight_decay))
