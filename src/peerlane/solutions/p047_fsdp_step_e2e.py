"""Problem 47, a sharded training step of a two-layer MLP: parameters are gathered, and one kernel sums gradients and updates the own part.

The public shape is bound by launches: of the products and of two kernels; larger ones by the products, and by the links, which carry the
parameters twice. The kernel is ``families/training_step.py``."""

from collections.abc import Sequence

import torch

from peerlane.device import communicator, group_of
from peerlane.solutions.families.training_step import Adam, adam_step, mlp_gradient


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
    gradient = mlp_gradient(group, X_local, y_local, communicator(group).all_gather(flat_param_shard).flatten(), param_shapes)
    state, adam = (flat_param_shard, exp_avg_shard, exp_avg_sq_shard), Adam(lr, beta1, beta2, eps, step, weight_decay)
    return adam_step(group, gradient, state, adam, sharded=True, gather=False)
