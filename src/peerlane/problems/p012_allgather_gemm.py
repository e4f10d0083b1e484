"""Problem 12: all-gather of the column shards of A, then a matrix product."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import matmul
from peerlane.problems.families.matmul import BF16, FP32


def reference(A_local: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    shards = [torch.empty_like(A_local) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, A_local)
    return torch.cat(shards, dim=1) @ B


PROBLEM = pc.Problem(
    id=12,
    slug="allgather_gemm",
    title="All-gather of K-shards and matrix product",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="All-gather + GEMM of tensor parallelism with activations sharded along the hidden dimension (Flux, Triton-distributed)",
    summary=(
        "A_local (M, K/W) holds columns [r K/W, (r+1) K/W) of A (M, K). Every rank returns A @ B (M, N) with its own B (K, N), accumulated "
        "in float32 in any order and rounded once. B may differ from rank to rank."
    ),
    reference=reference,
    inputs=matmul.gathered_operands,
    oracle=matmul.gathered_product,
    tolerance=matmul.gathered_tolerance,
    cost=matmul.gathered_cost,
    presets=(
        pc.preset(
            "small",
            "ragged tiles, shards of unlike scale, a zero shard, NaN and infinities",
            pc.case("tile_bf16", BF16, m=33, k_by_rank=(8,), n=65),
            pc.case("ragged_bf16", BF16, m=5, k_by_rank=(3,), n=7),
            pc.case("ragged_fp32", FP32, m=5, k_by_rank=(3,), n=7),
            pc.case("tile_fp32", FP32, m=33, k_by_rank=(8,), n=65),
            pc.case("rank_scale_bf16", BF16, m=33, k_by_rank=(8,), n=65, pattern="rank_scale"),
            pc.case("zero_shard_bf16", BF16, m=33, k_by_rank=(8,), n=65, pattern="zero_shard"),
            pc.case("special_bf16", BF16, m=33, k_by_rank=(8,), n=65, pattern="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, m=1024, k=512, n=1024)),
        pc.preset(
            "production_llama3_70b_qkv",
            "query, key and value projections, 4096 tokens (and 4093, no multiple of a tile): the link decides",
            pc.case("bf16", BF16, m=4096, k=8192, n_total=(64 + 2 * 8) * 128),
            pc.case("ragged_bf16", BF16, m=4093, k=8192, n_total=(64 + 2 * 8) * 128),
        ),
        pc.preset(
            "production_qwen3_32b_gate_up", "gate and up projections, 8192 tokens", pc.case("bf16", BF16, m=8192, k=5120, n_total=2 * 25600)
        ),
        pc.preset(
            "production_deepseek_v3_shared_expert_decode",
            "gate and up projections of the shared expert, replicated, 128 tokens",
            pc.case("bf16", BF16, m=128, k=7168, n=2 * 2048),
        ),
    ),
    alternative_solutions=matmul.GATHERED_VARIANTS,
    integer_exact=True,
    notes=("B has variance 1/K, as trained layers have, instead of 1, so that outputs are of order one.",),
)
