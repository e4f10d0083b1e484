"""Problem 11: all-gather of the column shards of A in transposed layout, then a matrix product."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import matmul
from peerlane.problems.families.matmul import BF16, FP32


def reference(A_local: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    # Rows of A^T lie one after the other on the ranks, so the gather of the transposed shards needs no concatenation.
    shard = A_local.t().contiguous()
    gathered = shard.new_empty(dist.get_world_size() * shard.shape[0], shard.shape[1])
    matmul.gather_flat(gathered, shard)
    return (B.t() @ gathered).t()


PROBLEM = pc.Problem(
    id=11,
    slug="allgather_gemm_AT",
    title="All-gather of K-shards (transposed layout) and matrix product",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="All-gather + GEMM operators of tensor-parallel kernel libraries (the family of Flux and Triton-distributed)",
    summary=(
        "A_local (M, K/W) holds columns [r K/W, (r+1) K/W) of A (M, K). Every rank returns A @ B with its own B (K, N), accumulated in "
        "float32 and rounded once, logically (M, N); any strides will do. B may differ from rank to rank."
    ),
    reference=reference,
    inputs=matmul.gathered_operands,
    oracle=matmul.gathered_product,
    tolerance=matmul.gathered_tolerance,
    cost=matmul.gathered_cost,
    presets=(
        pc.preset(
            "small",
            "ragged tiles, shards of unlike scale, a zero shard, outlier rows of B, NaN and infinities",
            pc.case("tile_bf16", BF16, m=33, k_by_rank=(16,), n=17),
            pc.case("ragged_bf16", BF16, m=5, k_by_rank=(3,), n=7),
            pc.case("ragged_fp32", FP32, m=5, k_by_rank=(3,), n=7),
            pc.case("rank_scale_bf16", BF16, m=33, k_by_rank=(16,), n=17, pattern="rank_scale"),
            pc.case("zero_shard_bf16", BF16, m=33, k_by_rank=(16,), n=17, pattern="zero_shard"),
            pc.case("outlier_rows_bf16", BF16, m=33, k_by_rank=(16,), n=17, pattern="outlier_rows"),
            pc.case("special_bf16", BF16, m=33, k_by_rank=(16,), n=17, pattern="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, m=1024, k=512, n=1024)),
        pc.preset(
            "production_llama3_70b_gate_up",
            "gate and up projections, 4096 tokens",
            pc.case("bf16", BF16, m=4096, k=8192, n_total=2 * 28672),
        ),
        pc.preset(
            "production_llama3_8b_gate_up", "gate and up projections, 8192 tokens", pc.case("bf16", BF16, m=8192, k=4096, n_total=2 * 14336)
        ),
        pc.preset(
            "production_llama3_70b_decode",
            "gate and up projections, 64 tokens: reading B decides",
            pc.case("bf16", BF16, m=64, k=8192, n_total=2 * 28672),
        ),
    ),
    alternative_solutions=matmul.GATHERED_VARIANTS,
    integer_exact=True,
    notes=(
        "The public reference returns a transposed view; ours does too, but strides are never compared, and a row-major result is as good.",
        "B has variance 1/K, as trained layers have, instead of 1, so that outputs are of order one.",
    ),
)
