"""Problem 41, ZeRO-1 on a two-layer MLP: behind the products one kernel sums gradients, updates the own part and stores it on all ranks.

Parameters come from rank 0. W2 and the first matrix of the gradient travel beside products. The public shape is bound by launches; larger
ones by the products, and by the links on both sides of them. The kernel is ``families/training_step.py``.

The next call overwrites the results, which lie in the arena."""

import torch

from peerlane.device import group_of
from peerlane.solutions.families.training_step import Adam, partitioned_mlp_step


def solution(
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
    adam = Adam(lr, beta1, beta2, eps, step)
    return partitioned_mlp_step(group_of(), (X_local, y_local), (W1, b1, W2, b2), (exp_avg_part, exp_avg_sq_part), adam)
