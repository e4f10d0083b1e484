"""Problem 7: reduce-scatter (sum) along the first axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems.contract import (
    AlternativeSolution,
    AnswerContext,
    Case,
    Cost,
    Draw,
    Expected,
    KnownWrongAnswer,
    Problem,
    Tolerance,
    case,
    preset,
)
from peerlane.problems.families.collective import (
    BF16,
    FP16,
    FP32,
    first_arguments,
    reduce_scatter_single,
    sequential_sum,
    stale_tail,
    sum_expected,
    sum_tolerance,
    summand,
    sweep,
    wide_sum,
)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    rows, *rest = tensor.shape
    total = tensor.new_empty((rows // dist.get_world_size(), *rest))
    reduce_scatter_single(total, tensor.contiguous())
    return total


def _shape(case: Case) -> tuple[int, ...]:
    """The input's shape: ``whole``, or ``slice`` with W times its leading length."""
    if "whole" in case.params:
        return tuple(case["whole"])
    rows, *rest = case["slice"]
    return (case.world_size * rows, *rest)


def inputs(case: Case, rank: int, draw: Draw) -> tuple[torch.Tensor]:
    return (summand(case, rank, draw, _shape(case)),)


def _slices(inputs: Sequence[tuple[Any, ...]], index: int) -> list[torch.Tensor]:
    """Slice ``index`` of every rank's tensor."""
    rows = inputs[0][0].shape[0] // len(inputs)
    return [tensor.narrow(0, index * rows, rows) for tensor in first_arguments(inputs)]


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> Expected:
    return sum_expected(_slices(inputs, rank), case.dtype)


def tolerance(case: Case) -> Mapping[str, Tolerance]:
    return sum_tolerance(case, torch.Size(_shape(case)).numel() // case.world_size)


def cost(case: Case, rank: int) -> Cost:
    elements, world = torch.Size(_shape(case)).numel(), case.world_size
    payload = elements * case.dtype.itemsize
    port = (world - 1) / world * payload
    return Cost(
        hbm_bytes=payload + payload / world,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32": (world - 1) / world * elements},
    )


def _own(context: AnswerContext) -> torch.Tensor:
    return _slices(context.inputs, context.rank)[context.rank].clone()


def _strided_rows(context: AnswerContext) -> torch.Tensor:
    return wide_sum([tensor[context.rank :: context.case.world_size] for tensor in first_arguments(context.inputs)])


PROBLEM = Problem(
    id=7,
    slug="reducescatter",
    title="Reduce-scatter (sum) along the first axis",
    category="collective",
    parallelism=("fsdp", "zero", "tensor", "sequence"),
    origin="NCCL / torch.distributed primitive; the gradient reduction of FSDP and ZeRO, Megatron-LM sequence parallelism",
    summary=(
        "With the leading length W m on all ranks, rank r returns the elementwise sum of all ranks' rows r m to (r + 1) m, in the input's "
        "dtype and in fresh storage. The order of the additions and the width of the accumulator are free. Inputs stay as they are."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=(
        preset(
            "small",
            "ragged, tiny and empty slices, cancellation, one sign only, NaN and infinities",
            case("ragged_bf16", BF16, slice=(3, 5)),
            case("scalar_fp32", FP32, slice=(1,)),
            case("empty_bf16", BF16, slice=(2, 0)),
            case("ragged_fp16", FP16, slice=(7, 29)),
            case("cancelling_bf16", BF16, slice=(61, 97), data="cancelling"),
            case("same_sign_bf16", BF16, slice=(37, 53), data="same_sign"),
            case("special_fp32", FP32, slice=(3, 5), data="special"),
        ),
        preset("pkb", "the public benchmark's shape", case("bf16", BF16, slice=(1024, 1024))),
        preset(
            "production_llama3_8b_layer_grad",
            "the flat gradients of one layer; half of them in float32",
            case("bf16", BF16, whole=(218112000,)),
            case("fp32", FP32, whole=(109056000,)),
        ),
        preset("production_llama3_70b_sp", "8192 tokens x hidden 8192", case("bf16", BF16, whole=(8192, 8192))),
        preset("production_llama3_70b_decode_sp", "64 tokens x hidden 8192: latency", case("bf16", BF16, whole=(64, 8192))),
        *sweep(lambda elements: {"whole": (elements,)}),
    ),
    known_wrong_answers=(
        KnownWrongAnswer("no_communication", "the rank's own slice", _own),
        KnownWrongAnswer("own_times_world", "the rank's own slice times the world size", lambda c: _own(c) * c.case.world_size),
        KnownWrongAnswer("first_slice", "the sum of the first slices on every rank", lambda c: c.answers[0]),
        KnownWrongAnswer(
            "drop_last_rank",
            "the sum without the last rank",
            lambda c: wide_sum(_slices(c.inputs, c.rank)[:-1]),
        ),
        KnownWrongAnswer(
            "strided_rows",
            "the sum of rows r, r + W, r + 2 W ... instead of consecutive ones",
            _strided_rows,
            cases=("small/ragged_bf16", "small/ragged_fp16", "small/cancelling_bf16", "small/same_sign_bf16", "small/special_fp32"),
        ),
        KnownWrongAnswer("stale_tail", "the last elements are those of the slot before", lambda c: stale_tail(c, 64)),
    ),
    alternative_solutions=(
        AlternativeSolution("fp32_accumulation", lambda _, inputs, rank: wide_sum(_slices(inputs, rank))),
        AlternativeSolution("sequential_in_dtype", lambda _, inputs, rank: sequential_sum(_slices(inputs, rank))),
    ),
    integer_exact=True,
    notes=(
        "The public benchmark feeds one constant per rank: the answer is one known number, and a wrong slice passes. Here every element "
        "differs and is new in every call.",
        "The public reference is judged by itself. Here a float64 sum is the truth, so a wider accumulator is never wrong.",
    ),
)
