"""Problem 80, Sinkhorn-Knopp by scaling vectors: the exponentials E stay as they are, and each iteration reads them twice.

The assignment is diag(u) E diag(v): an iteration takes v = 1 / (K sum over all ranks of E^T u) and u = 1 / (n E v), so the
total mass cancels. The number of samples travels with the first sum. Bound by HBM, which reads E twice an iteration, and writes it and
the result once. The reference passes over it about three times as often."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import communicator


def solution(
    teacher_output: torch.Tensor,
    teacher_temp: float,
    n_masked_patches_tensor: torch.Tensor,
    n_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    kit, (rows, prototypes) = communicator(group), teacher_output.shape
    q = torch.exp(teacher_output.to(torch.float32) / teacher_temp)
    sums = q.new_empty(prototypes + 1)
    sums[prototypes:].copy_(n_masked_patches_tensor)  # exact below 2^24
    u = q.new_ones(rows)
    torch.mv(q.t(), u, out=sums[:prototypes])
    kit.all_reduce(sums)
    samples = sums[prototypes:].clone()
    if n_iterations == 0:
        return q.mul_(samples / sums[:prototypes].sum())
    v = sums[:prototypes]
    for iteration in range(n_iterations):
        if iteration:
            v = torch.mv(q.t(), u)
            kit.all_reduce(v)
        v = v.mul(prototypes).reciprocal_()
        u = torch.mv(q, v).mul_(samples).reciprocal_()
    return q.mul_(v).mul_((u * samples).unsqueeze(1))
