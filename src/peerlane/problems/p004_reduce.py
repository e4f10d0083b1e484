"""Problem 4: reduce (sum) to one root."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import collective
from peerlane.problems.families.collective import BF16, FP32


def reference(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    total = tensor.clone()
    dist.reduce(total, dst=dst)
    # A backend may leave partial sums in the other ranks' buffers; gloo does.
    return total if dist.get_rank() == dst else total.copy_(tensor)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    return (collective.summand(case, rank, draw, case["shape"]), *collective.root_argument(case, draw))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    if rank != collective.root_of(inputs[rank]):
        return pc.exactly("own", inputs[rank][0])
    return collective.sum_expected(collective.first_arguments(inputs), case.dtype)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Every other port sends the payload once (partial sums pass through peers); the root's receives it once. Additions are shared."""
    elements = torch.Size(case["shape"]).numel()
    payload = elements * case.dtype.itemsize
    root = collective.may_be_root(case, rank)
    return pc.Cost(
        hbm_bytes=2 * payload,
        egress_bytes=0 if root else payload,
        ingress_bytes=payload if root else 0,
        flops={"fp32": (case.world_size - 1) / case.world_size * elements},
    )


def _by(total: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Callable[[pc.Case, pc.Inputs, int], pc.Tree]:
    """What a rank returns whose root computes the sum with ``total(terms)``."""

    def answer(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Tree:
        return total(collective.first_arguments(inputs)) if rank == collective.root_of(inputs[rank]) else inputs[rank][0].clone()

    return answer


PROBLEM = pc.Problem(
    id=4,
    slug="reduce",
    title="Reduce (sum) to one root",
    category="collective",
    parallelism=("data", "zero"),
    origin="NCCL / torch.distributed primitive; the gradient reduction to its owner in ZeRO-1 and ZeRO-2, metric collection",
    summary=(
        "Rank dst returns the elementwise sum of all ranks' tensors, in the input's shape and dtype; the order of the additions and the "
        "width of the accumulator are free. Every other rank returns a bit copy of its own tensor. Inputs stay as they are."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=collective.shape_tolerance,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "ragged, tiny and empty tensors, cancellation, NaN and infinities; roots 0, last and changing",
            pc.case("ragged_bf16", BF16, shape=(37, 53), root=0),
            pc.case("ragged_bf16_to_last", BF16, shape=(37, 53), root="last"),
            pc.case("tiny_fp32", FP32, shape=(5,), root=0),
            pc.case("tiny_fp32_to_last", FP32, shape=(5,), root="last"),
            pc.case("empty_bf16", BF16, shape=(0, 8), root=0),
            pc.case("cancelling_bf16", BF16, shape=(61, 97), root="any", data="cancelling"),
            pc.case("special_fp32", FP32, shape=(67,), root="last", data="special"),
        ),
        pc.preset("pkb", "the public benchmark's shape and root", pc.case("bf16", BF16, shape=(1024, 1024), root=0)),
        pc.preset(
            "production_zero2_bucket", "a 100 MB gradient bucket, its owner changing", pc.case("bf16", BF16, shape=(50000000,), root="any")
        ),
        pc.preset(
            "production_llama3_8b_layer_grad", "one weight's gradient, last rank", pc.case("bf16", BF16, shape=(14336, 4096), root="last")
        ),
        pc.preset("production_metrics", "1024 metrics: latency", pc.case("fp32", FP32, shape=(1024,), root=0)),
        *collective.sweep(lambda elements: {"shape": (elements,)}),
    ),
    known_wrong_answers=(
        pc.wrong(
            "drop_last_rank",
            "on the root the sum without the last rank",
            collective.at_root(lambda c: collective.wide_sum(collective.first_arguments(c.inputs[:-1]))),
        ),
        pc.wrong("sum_everywhere", "the sum on every rank: an all-reduce", lambda c: c.answers[collective.root_of(c.args)]),
        pc.wrong(
            "zeros_off_root",
            "nothing in the other ranks' outputs",
            lambda c: c.answer if c.rank == collective.root_of(c.args) else torch.zeros_like(c.answer),
        ),
        pc.wrong(
            "always_to_rank_0",
            "the sum on rank 0, whatever dst says",
            lambda c: c.answers[collective.root_of(c.args)] if c.rank == 0 else c.args[0],
            ("small/ragged_bf16_to_last", "small/tiny_fp32_to_last", "small/special_fp32"),
        ),
    ),
    alternative_solutions=pc.alternatives(fp32_accumulation=_by(collective.wide_sum), sequential_in_dtype=_by(collective.sequential_sum)),
    integer_exact=True,
    excused={
        "neighbours_exchanged": "a sum does not depend on the order of its terms",
        "echo/own": "off the root the answer is the rank's own tensor",
    },
    notes=(
        "The public benchmark feeds one constant per rank and always dst = 0, so nothing need be sent. Here every element differs, and dst "
        "is the first rank, the last, or another one in every slot.",
        "What the other ranks return is a by-product of the backend in the public reference (their own input with NCCL, partial sums with "
        "gloo). Here it is defined: a bit copy of the own input.",
        "Where dst changes between slots, the cost charges every rank as the root; the slowest rank's bound is the right one.",
    ),
)
