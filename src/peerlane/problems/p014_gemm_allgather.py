"""Problem 14: column-parallel matrix product, then all-gather of the output's columns."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import matmul
from peerlane.problems.families.matmul import BF16, FP32, FP64


def reference(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    block = A @ B
    blocks = [torch.empty_like(block) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, block)
    return torch.cat(blocks, dim=1)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    k = case["k"]
    source = draw.shared if case.params.get("replicated") else draw
    return (matmul.activations(case, rank, source, (case["m"], k), k), matmul.weights(case, draw, (k, matmul.columns(case)), k))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    n = matmul.columns(case)
    value = torch.zeros((case["m"], n * case.world_size), dtype=FP64, device=inputs[0][0].device)
    magnitude = torch.zeros_like(value)
    for q, (a, b) in enumerate(inputs):
        block = slice(q * n, (q + 1) * n)
        matmul.add_product(value[:, block], magnitude[:, block], a, b)
    return pc.Expected("product", value, case.dtype, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    return {"product": matmul.gemm_tolerance(case, case["m"] * matmul.columns(case) * case.world_size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    m, k, n, world, size = case["m"], case["k"], matmul.columns(case), case.world_size, case.dtype.itemsize
    port = (world - 1) * m * n * size
    return pc.Cost(
        hbm_bytes=(m * k + k * n + m * n * world) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={matmul.FLOP_UNIT[case.dtype]: 2 * m * k * n},
    )


def _blocks(case: pc.Case, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([(a.to(FP32) @ b.to(FP32)).to(case.dtype) for a, b in pairs], dim=1)


def _split_depth(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Two halves of K, each in float32, added before the rounding: what split-K kernels do."""
    half = case["k"] // 2
    blocks = []
    for a, b in inputs:
        a, b = a.to(FP32), b.to(FP32)
        blocks.append((a[:, :half] @ b[:half] + a[:, half:] @ b[half:]).to(case.dtype))
    return torch.cat(blocks, dim=1)


PRESETS = (
    pc.preset(
        "small",
        "ragged tiles and output rows of odd length, A equal on all ranks and not, blocks of unlike scale, NaN and infinities",
        pc.case("tile_bf16", BF16, m=33, k=16, n=7),
        pc.case("ragged_bf16", BF16, m=5, k=9, n=3),
        pc.case("ragged_fp32", FP32, m=5, k=9, n=3),
        pc.case("replicated_a_bf16", BF16, m=33, k=16, n=7, replicated=True),
        pc.case("rank_scale_bf16", BF16, m=33, k=16, n=7, pattern="rank_scale"),
        pc.case("special_bf16", BF16, m=33, k=16, n=7, pattern="special"),
    ),
    pc.preset("pkb", "the public benchmark's shape, A different on every rank", pc.case("bf16", BF16, m=1024, k=512, n_total=1024)),
    pc.preset(
        "production_llama3_70b_lm_head_decode",
        "logits of 256 tokens, A equal on all ranks, as in the modelled system (and not)",
        pc.case("bf16", BF16, m=256, k=8192, n_total=128256, replicated=True),
        pc.case("own_a_bf16", BF16, m=256, k=8192, n_total=128256),
    ),
    pc.preset("production_qwen3_8b_lm_head", "logits of 1024 tokens", pc.case("bf16", BF16, m=1024, k=4096, n_total=151936)),
    pc.preset("production_llama3_70b_up_gathered", "MLP up projection, 4096 tokens", pc.case("bf16", BF16, m=4096, k=8192, n_total=28672)),
)

PROBLEM = pc.Problem(
    id=14,
    slug="gemm_allgather",
    title="Column-parallel matrix product and all-gather of columns",
    category="tensor_parallel",
    parallelism=("tensor",),
    origin="Megatron-LM column-parallel linear layer with gathered output: logits of the language-model head",
    summary=(
        "Every rank returns (M, W N_local), the same bits everywhere: column block q is A_q @ B_q with rank q's own A (M, K) and B "
        "(K, N_local), accumulated in float32 and rounded once. A is not to be taken for replicated."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong("blocks_rotated", "every block in the next rank's place", lambda c: torch.roll(c.answer, matmul.columns(c.case), dims=1)),
        pc.wrong(
            "own_a_for_all",
            "gathers B and multiplies with the rank's own A: right only where A is replicated",
            lambda c: _blocks(c.case, [(c.args[0], b) for _, b in c.inputs]),
            lambda c: not c.params.get("replicated"),
        ),
    ),
    alternative_solutions=pc.alternatives(fp32_accumulation=lambda case, inputs, rank: _blocks(case, inputs), split_depth=_split_depth),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The modelled system has the same A on all ranks; the interface does not promise it, and the public benchmark's inputs differ, so "
        "cases of both kinds are checked.",
        "B has variance 1/K, as trained layers have, instead of 1, so that outputs are of order one.",
    ),
)
