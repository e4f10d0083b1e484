"""Problem 7: reduce-scatter (sum) along the first axis."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import collective
from peerlane.problems.families.collective import BF16, FP16, FP32


def reference(tensor: torch.Tensor) -> torch.Tensor:
    rows, *rest = tensor.shape
    total = tensor.new_empty((rows // dist.get_world_size(), *rest))
    collective.reduce_scatter_single(total, tensor.contiguous())
    return total


def _shape(case: pc.Case) -> tuple[int, ...]:
    """The input's shape: ``whole``, or ``slice`` with W times its leading length."""
    if "whole" in case.params:
        return tuple(case["whole"])
    rows, *rest = case["slice"]
    return (case.world_size * rows, *rest)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor]:
    return (collective.summand(case, rank, draw, _shape(case)),)


def _slices(inputs: pc.Inputs, index: int) -> list[torch.Tensor]:
    """Slice ``index`` of every rank's tensor."""
    rows = inputs[0][0].shape[0] // len(inputs)
    return [tensor.narrow(0, index * rows, rows) for tensor in collective.first_arguments(inputs)]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return collective.sum_expected(_slices(inputs, rank), case.dtype)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    return collective.sum_tolerance(case, torch.Size(_shape(case)).numel() // case.world_size)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    elements, world = torch.Size(_shape(case)).numel(), case.world_size
    payload = elements * case.dtype.itemsize
    port = pc.traffic.reduce_scatter(payload, world)
    return pc.Cost(
        hbm_bytes=payload + payload / world, egress_bytes=port, ingress_bytes=port, flops={"fp32": (world - 1) / world * elements}
    )


PROBLEM = pc.Problem(
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
        pc.preset(
            "small",
            "ragged, tiny and empty slices, cancellation, one sign only, NaN and infinities",
            pc.case("ragged_bf16", BF16, slice=(3, 5)),
            pc.case("scalar_fp32", FP32, slice=(1,)),
            pc.case("empty_bf16", BF16, slice=(2, 0)),
            pc.case("ragged_fp16", FP16, slice=(7, 29)),
            pc.case("cancelling_bf16", BF16, slice=(61, 97), data="cancelling"),
            pc.case("same_sign_bf16", BF16, slice=(37, 53), data="same_sign"),
            pc.case("special_fp32", FP32, slice=(3, 5), data="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, slice=(1024, 1024))),
        pc.preset(
            "production_llama3_8b_layer_grad",
            "the flat gradients of one layer; half of them in float32",
            pc.case("bf16", BF16, whole=(218112000,)),
            pc.case("fp32", FP32, whole=(109056000,)),
        ),
        pc.preset("production_llama3_70b_sp", "8192 tokens x hidden 8192", pc.case("bf16", BF16, whole=(8192, 8192))),
        pc.preset("production_llama3_70b_decode_sp", "64 tokens x hidden 8192: latency", pc.case("bf16", BF16, whole=(64, 8192))),
        *collective.sweep(lambda elements: {"whole": (elements,)}),
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms")},
    known_wrong_answers=(
        pc.wrong("first_slice", "the sum of the first slices on every rank", lambda c: c.answers[0]),
        pc.wrong(
            "strided_rows",
            "the sum of rows r, r + W, r + 2 W ... instead of consecutive ones",
            lambda c: collective.wide_sum([tensor[c.rank :: c.case.world_size] for tensor in collective.first_arguments(c.inputs)]),
            ("small/ragged_bf16", "small/ragged_fp16", "small/cancelling_bf16", "small/same_sign_bf16", "small/special_fp32"),
        ),
    ),
    alternative_solutions=pc.alternatives(
        fp32_accumulation=lambda _, inputs, rank: collective.wide_sum(_slices(inputs, rank)),
        sequential_in_dtype=lambda _, inputs, rank: collective.sequential_sum(_slices(inputs, rank)),
    ),
    integer_exact=True,
    notes=(
        "The public benchmark feeds one constant per rank: the answer is one known number, and a wrong slice passes. Here every element "
        "differs and is new in every call.",
        "The public reference is judged by itself. Here a float64 sum is the truth, so a wider accumulator is never wrong.",
    ),
)
