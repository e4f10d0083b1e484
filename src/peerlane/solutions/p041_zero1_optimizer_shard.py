"""Problem 41, ZeRO-1 on a two-layer MLP: behind the products one kernel sums gradients, updates the own part and stores it on all ranks.

Parameters come from rank 0 by one broadcast. The public shape is bound by launches: of the products and of three kernels; larger ones by
the products, and by the links, which carry the parameters three times. ``peerlane.device.training_step`` has the kernel."""

from __future__ import annotations

import torch

from peerlane.device import communicator, group_of
from peerlane.device.training_step import Adam, adam_step, mlp_gradient, unflatten


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
    group, tensors, size = group_of(), (W1, b1, W2, b2), exp_avg_part.numel()
    shapes = [tensor.shape for tensor in tensors]
    flat = W1.new_empty(group.world_size * size)
    if group.rank == 0:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    communicator(group).broadcast(flat, 0)
    gradient = mlp_gradient(X_local, y_local, flat, shapes)
    state = flat[group.rank * size : (group.rank + 1) * size], exp_avg_part, exp_avg_sq_part
    parameters, *moments = adam_step(group, gradient, state, Adam(lr, beta1, beta2, eps, step), sharded=True, gather=True)
    return (*unflatten(parameters, shapes), *moments)
