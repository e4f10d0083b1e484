"""Problem 86, Newton-Schulz iterations on a sharded matrix: Gram matrices of later steps follow from the first, so five steps need one sum.

With G = X X^T a step is X <- Q X, Q = a I + b G + c G^2, so that the next Gram matrix is Q G Q; the trace of the first is the squared norm.
Bound by products of square matrices in float32. Of large matrices the shard is narrower than these products are dear: there every step
sums its Gram matrix. After five steps the sum is taken anew, for rounding errors of singular matrices grow."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import communicator

COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4647, 0.5074),
        (2.2779, -1.6447, 0.4162), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
    ),
    "aol": ((4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)),
}  # fmt: skip
STEPS_OF_A_SUM, MOST_ROWS = 5, 1024
FLOOR = 1e-7


def solution(
    x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic", partition_dim: int = 1, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    kit, triples = communicator(group), COEFFICIENTS[coefficient_type]
    shard = (x if partition_dim == 1 else x.t()).to(torch.float32)
    at_once = STEPS_OF_A_SUM if shard.shape[0] <= MOST_ROWS else 1
    for first in range(0, max(steps, 1), at_once):
        gram = shard @ shard.t()
        kit.all_reduce(gram)
        if first == 0:
            norm = gram.trace().sqrt_().clamp_(min=FLOOR)
            shard, gram = shard / norm, gram / norm / norm
        total: torch.Tensor | None = None
        for step in range(first, min(first + at_once, steps)):
            a, b, c = triples[step % len(triples)]
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal().add_(a)
            total = factor if total is None else factor @ total
            if step + 1 < min(first + at_once, steps):
                gram = factor @ gram @ factor
        if total is not None:
            shard = total @ shard
    return (shard if partition_dim == 1 else shard.t()).to(x.dtype).contiguous()
