"""Problem 86, Newton-Schulz iterations over sharded columns or rows: cuBLAS in TensorFloat32, which the problem allows for bfloat16."""

from __future__ import annotations

import torch
import torch.distributed as dist

TRIPLES = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4647, 0.5074),
        (2.2779, -1.6447, 0.4162),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": ((4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)),
}


def solution(
    x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic", partition_dim: int = 1, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    torch.backends.cuda.matmul.allow_tf32 = x.dtype == torch.bfloat16
    triples = TRIPLES[coefficient_type]
    shard = (x if partition_dim == 1 else x.t()).to(torch.float32)
    square_norm = shard.square().sum()
    dist.all_reduce(square_norm, group=group)
    shard = shard / square_norm.sqrt().clamp(min=1e-7)
    for step in range(steps):
        a, b, c = triples[step % len(triples)]
        gram = shard @ shard.t()
        dist.all_reduce(gram, group=group)
        shard = torch.addmm(shard, torch.addmm(gram, gram, gram, beta=b, alpha=c), shard, beta=a)
    return (shard if partition_dim == 1 else shard.t()).to(x.dtype).contiguous()
