"""Problem 13: row-parallel matrix product, then all-reduce."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bits
from peerlane.problems.families import matmul
from peerlane.problems.families.matmul import BF16, FP32

_ALL = slice(None)


def reference(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    product = A_local @ B_local
    dist.all_reduce(product)
    return product


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    return matmul.row_parallel_operands(case, rank, draw, case["m"])


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return matmul.sum_of_products(case, inputs, _ALL)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The product is read or written once in full, and once more for the rank's 1/W of the reduction."""
    m, n, depth, world, size = case["m"], case["n"], matmul.shard_depths(case)[rank], case.world_size, case.dtype.itemsize
    port = pc.traffic.all_reduce(m * n * size, world)
    return pc.Cost(
        hbm_bytes=(m * depth + depth * n + m * n + m * n / world) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={matmul.FLOP_UNIT[case.dtype]: 2 * m * n * depth},
    )


def _sum_over(context: pc.AnswerContext, ranks: Sequence[int]) -> torch.Tensor:
    return matmul.wide_sum_of_products(context.case, [context.inputs[q] for q in ranks], _ALL)


def _eight_bits(context: pc.AnswerContext) -> torch.Tensor:
    parts = [(a.to(FP32) @ b.to(FP32)).to(context.case.dtype) for a, b in context.inputs]
    return torch.stack([eight_bits(part).to(FP32) for part in parts]).sum(0).to(context.case.dtype)


def _int8_operands(context: pc.AnswerContext) -> torch.Tensor:
    parts = [eight_bits(a.to(FP32)) @ eight_bits(b.t().to(FP32)).t() for a, b in context.inputs]
    return torch.stack(parts).sum(0).to(context.case.dtype)


PROBLEM = pc.Problem(
    id=13,
    slug="gemm_allreduce",
    title="Row-parallel matrix product and all-reduce",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="Megatron-LM row-parallel linear layer: attention output and MLP down projections",
    summary=(
        "Every rank returns the sum over ranks of A_local @ B_local (M, N), in the inputs' dtype with the same bits everywhere. K may "
        "differ from rank to rank. The order of the sum is free, and partial products may be rounded to the inputs' dtype or kept wider."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=matmul.product_tolerance,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "ragged tiles, unequal K, outlier channels, a zero shard, cancelling partial products, NaN and infinities",
            pc.case("unequal_k_bf16", BF16, m=5, k_by_rank=(3, 8, 1, 5), n=7),
            pc.case("unequal_k_fp32", FP32, m=5, k_by_rank=(3, 8, 1, 5), n=7),
            pc.case("tile_bf16", BF16, m=33, k_by_rank=(24, 7), n=17),
            pc.case("outliers_bf16", BF16, m=33, k_by_rank=(24, 7), n=17, pattern="outliers"),
            pc.case("zero_shard_bf16", BF16, m=33, k_by_rank=(24, 7), n=17, pattern="zero_shard"),
            pc.case("cancelling_bf16", BF16, m=33, k_by_rank=(24,), n=17, pattern="cancelling"),
            pc.case("special_bf16", BF16, m=33, k_by_rank=(24, 7), n=17, pattern="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape: K = 512 on every rank", pc.case("bf16", BF16, m=1024, k_by_rank=(512,), n=1024)),
        pc.preset("production_llama3_70b_down", "MLP down projection, 4096 tokens", pc.case("bf16", BF16, m=4096, k=28672, n=8192)),
        pc.preset(
            "production_llama3_70b_o_proj_decode",
            "attention output projection, 64 tokens: latency",
            pc.case("bf16", BF16, m=64, k=8192, n=8192),
        ),
        pc.preset("production_qwen3_32b_down", "MLP down projection, 8192 tokens", pc.case("bf16", BF16, m=8192, k=25600, n=5120)),
    ),
    known_wrong_answers=(
        pc.wrong("own_counted_twice", "the rank's own product added once too often", lambda c: _sum_over(c, [*c.ranks, c.rank])),
        pc.wrong(
            "products_in_eight_bits", "products are sent in 8-bit integers with a scale for every 32 neighbours", _eight_bits, ("pkb/bf16",)
        ),
        pc.wrong("int8_operands", "products of 8-bit integers with a scale for every 32 neighbours along K", _int8_operands, ("pkb/bf16",)),
    ),
    alternative_solutions=pc.alternatives(
        fp32_accumulation=lambda case, inputs, rank: matmul.wide_sum_of_products(case, inputs, _ALL),
        one_long_product=lambda case, inputs, rank: matmul.one_long_product(case, inputs, _ALL),
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms"), "another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The public benchmark judges by its reference, whose bfloat16 partial products are the largest error in sight, so that a correctly "
        "rounded answer fails there. Here the error is allowed to be what such partial products make it, and a wider sum passes with ease.",
        "B has variance 1/K over all ranks, as trained layers have, instead of 1, so that outputs are of order one.",
    ),
)
