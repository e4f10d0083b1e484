"""Problem 1001: what the worked examples of prompts compute, as a problem, so that they can be judged."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems.contract import UNIT_ROUNDOFF, Case, Cost, Draw, Expected, KnownWrongAnswer, Problem, Tolerance, case, preset


def reference(x: torch.Tensor) -> torch.Tensor:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x.contiguous())
    return x - everyone[dist.get_rank() - 1]


def inputs(case: Case, rank: int, draw: Draw) -> tuple[torch.Tensor]:
    return (draw.normal((case["rows"], case["columns"]), case.dtype, scale=1.0 + rank),)


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> Expected:
    own, left = (inputs[r][0].to(torch.float64) for r in (rank, rank - 1))
    return Expected("difference", own - left, case.dtype, magnitude=own.abs() + left.abs())


def tolerance(case: Case) -> Mapping[str, Tolerance]:
    return {"difference": Tolerance(magnitude=2 * UNIT_ROUNDOFF[case.dtype])}


def cost(case: Case, rank: int) -> Cost:
    payload = case["rows"] * case["columns"] * case.dtype.itemsize
    return Cost(hbm_bytes=3 * payload, egress_bytes=payload, ingress_bytes=payload)


SMALL = (case("bf16", torch.bfloat16, rows=7, columns=5), case("fp32", torch.float32, rows=3, columns=700))
PROBLEM = Problem(
    id=1001,
    slug="neighbour_difference",
    title="Difference to the left neighbour's tensor",
    category="collective",
    parallelism=("data",),
    origin="the worked examples of prompts",
    summary="Every rank returns its tensor minus its left neighbour's, in the input's shape and dtype.",
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=(
        preset("small", "two dtypes", *SMALL, case("one_fp16", torch.float16, rows=1, columns=1)),
        preset("pkb", "a megabyte", case("fp32", torch.float32, rows=512, columns=512)),
    ),
    known_wrong_answers=(KnownWrongAnswer("no_communication", "the rank's own tensor", lambda c: c.args[0].clone()),),
)
