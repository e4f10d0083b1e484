"""Problem 16: row-parallel matrix product, then reduce-scatter of the rows."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.contract.codes import eight_bits
from peerlane.problems.families import matmul
from peerlane.problems.families.matmul import BF16, FP32


def reference(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    product = A_local @ B_local
    rows = product.new_empty(product.shape[0] // dist.get_world_size(), product.shape[1])
    matmul.scatter_sum(rows, product)
    return rows


def _local_rows(case: pc.Case) -> int:
    return int(case["m_local"] if "m_local" in case.params else case["m"] // case.world_size)


def _rows_of(case: pc.Case, rank: int) -> slice:
    count = _local_rows(case)
    return slice(rank * count, (rank + 1) * count)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Pattern ``row_scale`` makes the rows of owner q 4^q times as large, so that a wrong slice shows in every measure of error."""
    a, b = matmul.row_parallel_operands(case, rank, draw, _local_rows(case) * case.world_size)
    if case.params.get("pattern") == "row_scale" and not draw.integer:
        for owner in range(case.world_size):
            a[_rows_of(case, owner)] *= 4.0**owner
    return a, b


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return matmul.sum_of_products(case, inputs, _rows_of(case, rank))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Partial products that are reduced as they arrive touch device memory only as operands and as the rank's own rows."""
    local, n, depth, world, size = _local_rows(case), case["n"], matmul.shard_depths(case)[rank], case.world_size, case.dtype.itemsize
    m, port = local * world, (world - 1) * local * n * size
    return pc.Cost(
        hbm_bytes=(m * depth + depth * n + local * n) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={matmul.FLOP_UNIT[case.dtype]: 2 * m * n * depth},
    )


def _rows_of_sum(context: pc.AnswerContext, owner: int) -> torch.Tensor:
    return matmul.wide_sum_of_products(context.case, context.inputs, _rows_of(context.case, owner))


def _eight_bits(context: pc.AnswerContext) -> torch.Tensor:
    parts = [(a.to(FP32) @ b.to(FP32)).to(context.case.dtype) for a, b in context.inputs]
    sent = [part if q == context.rank else eight_bits(part) for q, part in enumerate(parts)]
    return torch.stack([part[_rows_of(context.case, context.rank)].to(FP32) for part in sent]).sum(0).to(context.case.dtype)


PROBLEM = pc.Problem(
    id=16,
    slug="gemm_reducescatter",
    title="Row-parallel matrix product and reduce-scatter of rows",
    category="tensor_parallel",
    parallelism=("tensor", "sequence"),
    origin="Megatron-LM row-parallel linear layer under sequence parallelism",
    summary=(
        "Rank r returns rows [r M/W, (r+1) M/W) of the sum over ranks of A_local @ B_local, shape (M/W, N), in the inputs' dtype. K may "
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
            "ragged tiles, unequal K, row blocks of unlike scale, outlier channels, cancelling partial products, NaN and infinities",
            pc.case("unequal_k_bf16", BF16, m_local=3, k_by_rank=(3, 8, 1, 5), n=5),
            pc.case("unequal_k_fp32", FP32, m_local=3, k_by_rank=(3, 8, 1, 5), n=5),
            pc.case("row_scale_bf16", BF16, m_local=11, k_by_rank=(24, 7), n=17, pattern="row_scale"),
            pc.case("outliers_bf16", BF16, m_local=11, k_by_rank=(24, 7), n=17, pattern="outliers"),
            pc.case("zero_shard_bf16", BF16, m_local=11, k_by_rank=(24, 7), n=17, pattern="zero_shard"),
            pc.case("cancelling_bf16", BF16, m_local=11, k_by_rank=(24,), n=17, pattern="cancelling"),
            pc.case("special_bf16", BF16, m_local=11, k_by_rank=(24, 7), n=17, pattern="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape: K = 512 over all ranks", pc.case("bf16", BF16, m=1024, k=512, n=1024)),
        pc.preset("production_llama3_70b_down_sp", "MLP down projection, 8192 tokens", pc.case("bf16", BF16, m=8192, k=28672, n=8192)),
        pc.preset(
            "production_llama3_70b_o_proj_sp",
            "attention output projection, 8192 tokens: the link decides",
            pc.case("bf16", BF16, m=8192, k=8192, n=8192),
        ),
        pc.preset("production_qwen3_8b_down_sp", "MLP down projection, 16384 tokens", pc.case("bf16", BF16, m=16384, k=12288, n=4096)),
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms")},
    known_wrong_answers=(
        pc.wrong(
            "products_in_eight_bits", "products are sent in 8-bit integers with a scale for every 32 neighbours", _eight_bits, ("pkb/bf16",)
        ),
        pc.wrong("first_rows", "rank 0's rows of the sum on every rank", lambda c: _rows_of_sum(c, 0)),
        pc.wrong("mirrored_rows", "the rows of rank W - 1 - r", lambda c: _rows_of_sum(c, c.case.world_size - 1 - c.rank)),
    ),
    alternative_solutions=pc.alternatives(
        fp32_accumulation=lambda case, inputs, rank: matmul.wide_sum_of_products(case, inputs, _rows_of(case, rank)),
        one_long_product=lambda case, inputs, rank: matmul.one_long_product(case, inputs, _rows_of(case, rank)),
    ),
    integer_exact=True,
    notes=(
        "The public benchmark judges by its reference, whose bfloat16 partial products are the largest error in sight, so that a correctly "
        "rounded answer fails there. Here the error is allowed to be what such partial products make it, and a wider sum passes with ease.",
        "B has variance 1/K over all ranks, as trained layers have, instead of 1, so that outputs are of order one.",
    ),
)
