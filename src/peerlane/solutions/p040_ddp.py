"""Problem 40, a data-parallel training step of a two-layer MLP: one broadcast of all state, one sum of gradients, and Adam in one kernel.

All ranks update all state, which costs less than the links would take to spread it. The public shape is bound by launches; larger ones by
the products, and by the links, which carry three times the parameters from rank 0. The kernel is ``families/training_step.py``."""

import torch

from peerlane.device import communicator, group_of
from peerlane.solutions.families.training_step import Adam, adam_step, from_first_rank, mlp_gradient, unflatten


def solution(
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
    group, kit = group_of(), communicator()
    tensors = (
        W1, b1, W2, b2, exp_avg_W1, exp_avg_b1, exp_avg_W2, exp_avg_b2, exp_avg_sq_W1, exp_avg_sq_b1, exp_avg_sq_W2, exp_avg_sq_b2,
    )  # fmt: skip
    shapes, count = [tensor.shape for tensor in tensors], sum(tensor.numel() for tensor in tensors[:4])
    parameters, first, second = from_first_rank(group, tensors, 3 * count, waits=True).view(3, count).unbind()
    gradient = mlp_gradient(group, X_local, y_local, parameters, shapes[:4])
    kit.all_reduce(gradient)
    new = adam_step(group, gradient, (parameters, first, second), Adam(lr, beta1, beta2, eps, step), sharded=False, gather=False)
    results = [part for flat in new for part in unflatten(flat, shapes[:4])]
    return (*(part.requires_grad_() for part in results[:4]), *results[4:])
