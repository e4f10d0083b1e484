"""Problem 1: all-reduce (sum) of one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems._draw import Draw
from peerlane.problems._spec import (
    UNIT_ROUNDOFF,
    Case,
    Cost,
    Expected,
    HonestVariant,
    NullAnswer,
    NullContext,
    Problem,
    Tolerance,
    case,
    preset,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@torch.no_grad()
def reference(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def inputs(case: Case, rank: int, draw: Draw) -> tuple[torch.Tensor]:
    shape, dtype = case["shape"], case.dtype
    if draw.integer:
        # 32 values per rank and at most 8 ranks: every partial sum is an integer of size 256 or less, exact in bfloat16.
        return (draw.integers(-16, 17, shape, dtype),)
    scale = 1.0 + 0.1 * rank
    if case.params.get("cancelling"):
        # Rank 0 holds a large value that rank 1 takes away again, so that the small rest decides.
        large = draw.shared.normal(shape, FP32, scale=64.0)
        sign = {0: 1.0, 1: -1.0}.get(rank, 0.0)
        return ((sign * large + draw.normal(shape, FP32)).to(dtype),)
    if case.params.get("special"):
        values = draw.normal(shape, dtype, scale=scale).reshape(-1)
        values[(7 * rank + 1) % values.numel()] = float("nan")
        values[(7 * rank + 4) % values.numel()] = float("inf")
        return (values.reshape(shape),)
    return (draw.normal(shape, dtype, scale=scale),)


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> Expected:
    wide = [args[0].to(torch.float64) for args in inputs]
    total = wide[0].clone()
    magnitude = wide[0].abs()
    for value in wide[1:]:
        total += value
        magnitude += value.abs()
    return Expected("sum", total, case.dtype, magnitude=magnitude)


def tolerance(case: Case) -> Mapping[str, Tolerance]:
    """W - 1 additions and one rounding of the result, each in the working dtype, on terms no larger than the sum of magnitudes."""
    u = UNIT_ROUNDOFF[case.dtype]
    normwise = None if case.params.get("cancelling") else {BF16: 1e-2, FP16: 2e-3, FP32: 1e-6}[case.dtype]
    return {"sum": Tolerance(magnitude=(case.world_size + 1) * u, normwise=normwise)}


def cost(case: Case, rank: int) -> Cost:
    elements = torch.Size(case["shape"]).numel()
    payload, world = elements * case.dtype.itemsize, case.world_size
    port = 2 * (world - 1) / world * payload
    return Cost(
        hbm_bytes=2 * payload,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": (world - 1) / world * elements},
    )


def _drop_last_rank(context: NullContext) -> torch.Tensor:
    return torch.stack([args[0].to(torch.float64) for args in context.inputs[:-1]]).sum(0).to(context.case.dtype)


def _wide_sum(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    return torch.stack([args[0].to(FP32) for args in inputs]).sum(0).to(case.dtype)


def _sequential_sum(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    total: torch.Tensor = inputs[0][0].clone()
    for args in inputs[1:]:
        total += args[0]
    return total


PROBLEM = Problem(
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
    tolerance=tolerance,
    cost=cost,
    presets=(
        preset(
            "small",
            "ragged, tiny and empty tensors, cancellation, NaN and infinities",
            case("ragged_bf16", BF16, shape=(37, 53)),
            case("scalar_fp32", FP32, shape=(1,)),
            case("empty_bf16", BF16, shape=(0, 8)),
            case("ragged_fp16", FP16, shape=(3, 5, 7)),
            case("cancelling_bf16", BF16, shape=(37, 53), cancelling=True),
            case("special_fp32", FP32, shape=(67,), special=True),
        ),
        preset("pkb", "the public benchmark's shape", case("bf16", BF16, shape=(1024, 1024))),
        preset("production_llama3_70b_decode", "64 tokens x hidden 8192", case("bf16", BF16, shape=(64, 8192))),
        preset("production_llama3_70b_decode8", "8 tokens x hidden 8192: latency", case("bf16", BF16, shape=(8, 8192))),
        preset("production_llama3_70b_prefill", "4096 tokens x hidden 8192", case("bf16", BF16, shape=(4096, 8192))),
        preset(
            "production_ddp_bucket",
            "a 25 MiB gradient bucket, and one of odd length",
            case("fp32", FP32, shape=(6553600,)),
            case("odd_fp32", FP32, shape=(6553593,)),
        ),
    ),
    null_answers=(
        NullAnswer("no_communication", "the rank's own tensor", lambda c: c.args[0].clone()),
        NullAnswer("own_times_world", "the rank's own tensor times the world size", lambda c: c.args[0] * c.case.world_size),
        NullAnswer("drop_last_rank", "the sum without the last rank", _drop_last_rank),
    ),
    honest_variants=(
        HonestVariant("fp32_accumulation", _wide_sum),
        HonestVariant("sequential_in_dtype", _sequential_sum),
    ),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The public benchmark feeds one constant per rank, so a fill kernel passes; here every element differs and is new in every call.",
        "The public reference is judged by itself; here a float64 sum is the truth, so a wider accumulator is never wrong.",
    ),
)
