"""Problem 1: all-reduce (sum) of one tensor."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP16, FP32, sequential_sum, shape_tolerance, sum_expected, summand, sweep, wide_sum


def reference(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor]:
    return (summand(case, rank, draw, case["shape"]),)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return sum_expected([tensor for (tensor,) in inputs], case.dtype)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    elements = torch.Size(case["shape"]).numel()
    payload, world = elements * case.dtype.itemsize, case.world_size
    port = pc.traffic.all_reduce(payload, world)
    return pc.Cost(hbm_bytes=2 * payload, egress_bytes=port, ingress_bytes=port, flops={"fp32": (world - 1) / world * elements})


PROBLEM = pc.Problem(
    id=1,
    slug="allreduce",
    title="All-reduce (sum) of one tensor",
    category="collective",
    parallelism=("tensor", "data"),
    origin="NCCL / torch.distributed primitive; the communication of Megatron-LM tensor parallelism and of DDP",
    summary=(
        "Every rank returns the elementwise sum of all ranks' tensors, in the input's shape and dtype and in fresh storage. "
        "The order of the additions and the width of the accumulator are free."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=shape_tolerance,
    cost=cost,
    bandwidth="production_llama3_70b_prefill",
    presets=(
        pc.preset(
            "small",
            "ragged, tiny and empty tensors, cancellation, NaN and infinities",
            pc.case("ragged_bf16", BF16, shape=(37, 53)),
            pc.case("scalar_fp32", FP32, shape=(1,)),
            pc.case("empty_bf16", BF16, shape=(0, 8)),
            pc.case("ragged_fp16", FP16, shape=(3, 5, 7)),
            pc.case("cancelling_bf16", BF16, shape=(61, 97), data="cancelling"),
            pc.case("special_fp32", FP32, shape=(67,), data="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(1024, 1024))),
        pc.preset("production_llama3_70b_decode", "64 tokens x hidden 8192", pc.case("bf16", BF16, shape=(64, 8192))),
        pc.preset("production_llama3_70b_decode8", "8 tokens x hidden 8192: latency", pc.case("bf16", BF16, shape=(8, 8192))),
        pc.preset("production_llama3_70b_prefill", "4096 tokens x hidden 8192", pc.case("bf16", BF16, shape=(4096, 8192))),
        pc.preset(
            "production_ddp_bucket",
            "a 25 MiB gradient bucket, and one of odd length",
            pc.case("fp32", FP32, shape=(6553600,)),
            pc.case("odd_fp32", FP32, shape=(6553593,)),
        ),
        *sweep(lambda elements: {"shape": (elements,)}),
    ),
    alternative_solutions=pc.alternatives(
        fp32_accumulation=lambda case, inputs, rank: wide_sum([tensor for (tensor,) in inputs]),
        sequential_in_dtype=lambda case, inputs, rank: sequential_sum([tensor for (tensor,) in inputs]),
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms"), "another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The public benchmark feeds one constant per rank, so a fill kernel passes. Here every element differs and is new in every call.",
        "The public reference is judged by itself. Here a float64 sum is the truth, so a wider accumulator is never wrong.",
    ),
)
