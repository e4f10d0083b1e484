"""Problem 40, a data-parallel training step of a two-layer MLP: state from rank 0, sums of gradients, and Adam.

All ranks update all state, which costs less than the links would take to spread it. Two ranks exchange whole gradients, and sum them in the
kernel that updates; moments and half of the gradient travel beside the products. The public shape is bound by launches; larger ones by the
products. The kernel is ``families/training_step.py``."""

import torch

from peerlane.device import communicator, group_of
from peerlane.solutions.families.training_step import Adam, adam_step, from_first_rank, mlp_gradient, step_of, unflatten


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
    group, adam = group_of(), Adam(lr, beta1, beta2, eps, step)
    tensors = (
        W1, b1, W2, b2, exp_avg_W1, exp_avg_b1, exp_avg_W2, exp_avg_b2, exp_avg_sq_W1, exp_avg_sq_b1, exp_avg_sq_W2, exp_avg_sq_b2,
    )  # fmt: skip
    count = sum(tensor.numel() for tensor in tensors[:4])
    update = step_of(group, count, W1.dtype, "whole" if group.world_size == 2 else "sums")
    known, arrive = from_first_rank(group, tensors, waits=True)
    gradient, copied = mlp_gradient(group, X_local, y_local, known[:4], update, arrive)
    if update.sharing == "sums":
        communicator(group).all_reduce(gradient)
    flat = [tensor.view(-1) for tensor in known]
    new = adam_step(update, gradient, copied, list(zip(flat[:4], flat[4:8], flat[8:], strict=True)), adam)
    results = [part for whole in new for part in unflatten(whole, [tensor.shape for tensor in tensors[:4]])]
    return (*(part.requires_grad_() for part in results[:4]), *results[4:])
