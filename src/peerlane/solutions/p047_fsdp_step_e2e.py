"""Problem 47, a sharded training step of a two-layer MLP: parameters are gathered, and one kernel sums gradients and updates the own part.

The public shape is bound by launches: of the products and of two kernels; larger ones by the products, and by the links, which carry the
parameters twice. The kernel is ``families/training_step.py``."""

from collections.abc import Sequence

import torch

from peerlane.device import group_of
from peerlane.solutions.families.training_step import Adam, adam_step, mlp_gradient, spread_state


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
    size = flat_param_shard.numel()
    # The last call's update began behind a barrier that all ranks came to with their gradients, hence with the parameters read.
    whole = spread_state(group, [flat_param_shard], group.world_size * size, flat_param_shard.dtype, first=group.rank * size)
    gradient = mlp_gradient(group, X_local, y_local, whole, param_shapes)
    state, adam = (flat_param_shard, exp_avg_shard, exp_avg_sq_shard), Adam(lr, beta1, beta2, eps, step, weight_decay)
    return adam_step(group, gradient, state, adam, sharded=True, gather=False)
