"""Problem 86, Newton-Schulz iterations on a sharded matrix: a step sums one Gram matrix over ranks.

The trace of the first one is the squared norm, so the norm costs no sum of its own. Products of bfloat16 matrices run in TensorFloat32, as
the problem allows. A later Gram matrix follows from the first alone, which would save sums; rounding errors of singular matrices then grow
beyond bounds in TensorFloat32, and in float32 the larger products cost more than the sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
FLOOR = 1e-7


@contextmanager
def tensor_float32(wanted: bool) -> Iterator[None]:
    """Makes products of float32 operands run in TensorFloat32, or in float32."""
    cublas = torch.backends.cuda.matmul
    before = cublas.fp32_precision
    cublas.allow_tf32 = wanted  # torch refuses products if the older switch says another thing than the newer one
    try:
        yield
    finally:
        cublas.allow_tf32, cublas.fp32_precision = before == "tf32", before


def solution(
    x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic", partition_dim: int = 1, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    kit, triples = communicator(group), COEFFICIENTS[coefficient_type]
    shard = (x if partition_dim == 1 else x.t()).to(torch.float32)
    with tensor_float32(x.dtype == torch.bfloat16):
        for step in range(max(steps, 1)):
            gram = shard @ shard.t()
            kit.all_reduce(gram)
            if step == 0:
                norm = gram.trace().sqrt_().clamp_(min=FLOOR)
                shard, gram = shard / norm, gram / norm / norm
            if step < steps:
                a, b, c = triples[step % len(triples)]
                shard = torch.addmm(shard, torch.addmm(gram, gram, gram, beta=b, alpha=c), shard, beta=a)
    return (shard if partition_dim == 1 else shard.t()).to(x.dtype).contiguous()
