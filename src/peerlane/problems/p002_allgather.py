"""Problem 2: all-gather with stacked output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems.contract import Case, Cost, Draw, Expected, KnownWrongAnswer, Problem, case, exactly, preset
from peerlane.problems.families.collective import BF16, FP32, all_gather_single, first_arguments, stale_part, stale_tail, sweep


def reference(tensor: torch.Tensor) -> torch.Tensor:
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    # The flat form works on every backend; gloo refuses the stacked one.
    all_gather_single(gathered.view(-1), tensor.contiguous().view(-1))
    return gathered


def _shape(case: Case) -> tuple[int, ...]:
    """One rank's shape: ``shape``, or ``whole`` cut into W parts along axis 0."""
    if "whole" in case.params:
        rows, *rest = case["whole"]
        return (rows // case.world_size, *rest)
    return tuple(case["shape"])


def inputs(case: Case, rank: int, draw: Draw) -> tuple[torch.Tensor]:
    return (draw.bits(_shape(case), case.dtype),)


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int) -> Expected:
    return exactly("gathered", torch.stack(first_arguments(inputs)))


def cost(case: Case, rank: int) -> Cost:
    shard, world = torch.Size(_shape(case)).numel() * case.dtype.itemsize, case.world_size
    port = (world - 1) * shard
    return Cost(hbm_bytes=(1 + world) * shard, egress_bytes=port, ingress_bytes=port)


PROBLEM = Problem(
    id=2,
    slug="allgather",
    title="All-gather with stacked output",
    category="collective",
    parallelism=("fsdp", "zero", "sequence"),
    origin="NCCL / torch.distributed primitive; the parameter all-gather of FSDP and ZeRO, the activation gather of sequence parallelism",
    summary=(
        "With tensors of shape S and one dtype on all ranks, every rank returns a contiguous tensor of shape (W, *S) whose entry q is a "
        "bit copy of rank q's tensor. The leading axis is always added."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        preset(
            "small",
            "ragged, tiny, empty and odd-sized tensors of random bits",
            case("ragged_bf16", BF16, shape=(5, 7)),
            case("scalar_int64", torch.int64, shape=(1,)),
            case("empty_bf16", BF16, shape=(3, 0)),
            case("ragged_fp32", FP32, shape=(33, 17)),
            case("odd_bytes_uint8", torch.uint8, shape=(4097,)),
            case("ragged_uint8", torch.uint8, shape=(33, 17)),
        ),
        preset("pkb", "the public benchmark's shape", case("bf16", BF16, shape=(1024, 1024))),
        preset("production_llama3_8b_layer_fsdp", "the parameters of one layer, sharded, flat", case("bf16", BF16, whole=(218112000,))),
        preset("production_llama3_70b_tp_sp", "8192/W tokens x hidden 8192", case("bf16", BF16, whole=(8192, 8192))),
        preset("production_small_control", "256 numbers per rank: latency", case("int64", torch.int64, shape=(256,))),
        *sweep(lambda elements: {"whole": (elements,)}),
    ),
    known_wrong_answers=(
        KnownWrongAnswer("no_communication", "the rank's own tensor W times", lambda c: torch.stack([c.args[0]] * c.case.world_size)),
        KnownWrongAnswer("ranks_reversed", "the last rank first", lambda c: c.answer.flip(0)),
        KnownWrongAnswer(
            "ring_order", "in the order of arrival on a ring: the rank's own tensor first", lambda c: c.answer.roll(-c.rank, 0)
        ),
        KnownWrongAnswer("not_stacked", "the leading axes merged", lambda c: c.answer.flatten(0, 1)),
        KnownWrongAnswer("stale_part", "the last rank's tensor is that of the slot before", stale_part),
        KnownWrongAnswer("stale_tail", "the last elements are those of the slot before", stale_tail),
    ),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    notes=(
        "The public benchmark feeds the constant r+1 on rank r, so the answer can be written without communication, and order and offsets "
        "inside a shard go untested. Here the bits are random and compared bit for bit, NaN payloads and signed zeros included.",
    ),
)
