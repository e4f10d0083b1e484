"""Problem 5: scatter slices of the root's tensor."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, may_be_root, root_argument, root_of, sweep


def reference(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    if dist.get_rank() != src:
        received = torch.empty_like(tensor)
        dist.scatter(received, None, src=src)
        return received
    world_size = dist.get_world_size()
    rows, *rest = tensor.shape
    shape = rest if rows == world_size else [rows // world_size, *rest]
    received = tensor.new_empty(shape)
    dist.scatter(received, list(tensor.view(world_size, *shape).unbind()), src=src)
    return received


def _rows(case: pc.Case) -> tuple[int, tuple[int, ...]]:
    """k and S: ``rows`` and ``rest``, or the W-th part of a vector of ``whole`` numbers."""
    if "whole" in case.params:
        return case["whole"] // case.world_size, ()
    return case["rows"], tuple(case["rest"])


def _slice_shape(case: pc.Case) -> tuple[int, ...]:
    """One rank's output: k rows of shape S, without the leading axis if k is 1."""
    rows, rest = _rows(case)
    return rest if rows == 1 else (rows, *rest)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    root = root_argument(case, draw)
    if rank == root_of((None, *root)):
        rows, rest = _rows(case)
        return (draw.bits((case.world_size * rows, *rest), case.dtype), *root)
    template = draw.bits(_slice_shape(case), case.dtype)
    if case.params.get("poison"):
        template.fill_(float("nan"))
    return (template, *root)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("received", _slice_of_root(case, inputs, rank))


def _slice_of_root(case: pc.Case, inputs: pc.Inputs, index: int) -> torch.Tensor:
    whole: torch.Tensor = inputs[root_of(inputs[0])][0]
    rows, _ = _rows(case)
    return whole.narrow(0, index * rows, rows).reshape(_slice_shape(case))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    part, world = torch.Size(_slice_shape(case)).numel() * case.dtype.itemsize, case.world_size
    if may_be_root(case, rank):
        return pc.Cost(hbm_bytes=(world + 1) * part, egress_bytes=(world - 1) * part, ingress_bytes=0)
    return pc.Cost(hbm_bytes=part, egress_bytes=0, ingress_bytes=part)


def _no_communication(context: pc.AnswerContext) -> pc.Tree:
    return (context.answer if context.rank == root_of(context.args) else context.args[0]).clone()


PROBLEM = pc.Problem(
    id=5,
    slug="scatter",
    title="Scatter slices of the root's tensor",
    category="collective",
    parallelism=("data", "expert"),
    origin="torch.distributed primitive; distribution of batches by a data loader and of parameters by one rank",
    summary=(
        "Rank src holds a tensor of shape (W k, *S); rank r returns a bit copy of its rows r k to (r + 1) k, in fresh storage (the root "
        "too). The result has shape (k, *S), or S if k is 1. On every other rank the argument is a template of the result's shape and "
        "dtype whose contents do not matter."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    bandwidth="production_activation_scatter",
    presets=(
        pc.preset(
            "small",
            "one row and several rows per rank, scalars, odd sizes, empty; roots 0, last and changing",
            pc.case("row_bf16", BF16, rows=1, rest=(5, 7), root=0),
            pc.case("row_bf16_from_last", BF16, rows=1, rest=(5, 7), root="last"),
            pc.case("rows_int64", torch.int64, rows=3, rest=(4,), root=0),
            pc.case("rows_int64_from_last", torch.int64, rows=3, rest=(4,), root="last"),
            pc.case("scalar_int64", torch.int64, rows=1, rest=(), root="any"),
            pc.case("unit_axis_bf16", BF16, rows=1, rest=(1, 3), root=0),
            pc.case("odd_bytes_uint8", torch.uint8, rows=3, rest=(1367,), root="any"),
            pc.case("empty_bf16", BF16, rows=2, rest=(0,), root=0),
            pc.case("nan_templates_bf16", BF16, rows=1, rest=(5, 7), root="last", poison=True),
        ),
        pc.preset("pkb", "the public benchmark's shape and root, src left out", pc.case("bf16", BF16, rows=1, rest=(1024, 1024))),
        pc.preset(
            "production_token_batch", "8 sequences of 8192 token ids per rank", pc.case("int64", torch.int64, rows=8, rest=(8192,), root=0)
        ),
        pc.preset(
            "production_activation_scatter", "2048 tokens x hidden 8192 per rank", pc.case("bf16", BF16, rows=1, rest=(2048, 8192), root=0)
        ),
        pc.preset(
            "production_deepseek_v3_expert_weights",
            "16 expert matrices per rank, from the last rank",
            pc.case("bf16", BF16, rows=16, rest=(2048, 7168), root="last"),
        ),
        *sweep(lambda elements: {"whole": elements}),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "the template as it came; the right slice on the root", _no_communication),
        pc.wrong("first_slice", "slice 0 on every rank", lambda c: c.answers[0]),
        pc.wrong(
            "always_from_rank_0",
            "rank 0's argument, whatever src says",
            lambda c: c.inputs[0][0].clone(),
            ("small/row_bf16_from_last", "small/rows_int64_from_last", "small/nan_templates_bf16"),
        ),
        pc.wrong(
            "strided_rows",
            "rows r, r + W, r + 2 W ... instead of consecutive ones",
            lambda c: c.inputs[root_of(c.args)][0][c.rank :: c.case.world_size].clone(),
            ("small/rows_int64", "small/rows_int64_from_last", "small/odd_bytes_uint8"),
        ),
        pc.wrong(
            "leading_axis_kept",
            "shape (1, *S) where one row per rank loses its axis",
            lambda c: c.answer.unsqueeze(0),
            ("small/row_bf16", "small/row_bf16_from_last", "small/scalar_int64", "small/unit_axis_bf16"),
        ),
    ),
    notes=(
        "In the public benchmark rank r's answer is the constant r+1, always from rank 0 and with one row per rank. Here the bits are "
        "random, src varies, and there are several rows per rank.",
        "A template holds random bits or NaN, not zeros, so that returning it is never right by chance.",
        "Where src changes between slots, the cost charges every rank as the root; the slowest rank's bound is the right one.",
    ),
)
