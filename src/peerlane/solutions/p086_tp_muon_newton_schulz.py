"""Problem 86, Newton-Schulz iterations on a sharded matrix: three products a step on tensor cores.

X and its Gram matrix are float16, scaled by powers of two: as many bits as TensorFloat32, twice as fast. The first product sums the Gram
matrix over ranks while it computes. The second makes the polynomial. Both compute half of their tiles, for the results are symmetric. The
third adds a X in its epilogue and keeps what rounding leaves of X. ``peerlane/products/newton_schulz.cuh`` has them. float32 needs
more bits: its products run in float32, and a sum over ranks follows.

A later Gram matrix follows from the first alone, which would save sums; rounding errors of singular matrices then grow beyond bounds."""

import torch
import torch.distributed as dist

from peerlane.device import communicator, group_of
from peerlane.device.products import gemm
from peerlane.device.products.newton_schulz import gram_all_reduce, parts_product, symmetric_product

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
# X is kept 64 times and G and its polynomial 4096 times as large: X is below 2 in the 2-norm after any step, its polynomial below 16.
X_SCALE, G_SCALE = 64.0, 4096.0
HALF = torch.float16


def in_halves(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``factor * x`` in float16, and what rounding has left."""
    (m, n), scaled = x.shape, x.to(torch.float32) * factor
    high, low = (gemm.empty_aligned(m, n, x.new_empty(0, dtype=HALF)) for _ in range(2))
    high.copy_(scaled)
    low.copy_(scaled.sub_(high))
    return high, low


def solution(
    x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic", partition_dim: int = 1, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    kit, ranks, triples = communicator(group), group_of(group), COEFFICIENTS[coefficient_type]
    shard = x if partition_dim == 1 else x.t()
    (m, n), in_float16 = shard.shape, x.dtype == torch.bfloat16 and steps > 0
    if not in_float16:
        return in_float32(shard, steps, triples, partition_dim, group)
    norm = x.to(torch.float32).square().sum()
    kit.all_reduce(norm)
    parts = in_halves(shard, X_SCALE / norm.sqrt_().clamp_(min=FLOOR))
    gram_of, polynomial_of = gram_all_reduce(ranks, m, HALF), symmetric_product(ranks, m, HALF)
    for step in range(steps):
        a, b, c = triples[step % len(triples)]
        polynomial = polynomial_of(gram_of(parts[0]), c / G_SCALE, b)
        if step + 1 < steps:
            parts = parts_product(ranks, m, n, HALF)(polynomial, parts, 1 / G_SCALE, a)
        else:
            last = parts_product(ranks, m, n, HALF, torch.bfloat16)
            shard, _ = last(polynomial, parts, 1 / (G_SCALE * X_SCALE), a / X_SCALE)
    return (shard if partition_dim == 1 else shard.t()).contiguous()


def in_float32(
    x: torch.Tensor, steps: int, triples: tuple[tuple[float, float, float], ...], partition_dim: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The trace of the first Gram matrix is the squared norm, so the norm costs no sum of its own."""
    kit, shard = communicator(group), x.to(torch.float32)
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
