"""Problem 6: gather to one root with stacked output."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import collective
from peerlane.problems.families.collective import BF16, FP32


def reference(tensor: torch.Tensor, dst: int = 0) -> torch.Tensor:
    if dist.get_rank() != dst:
        dist.gather(tensor, None, dst=dst)
        return tensor
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    dist.gather(tensor, list(gathered.unbind()), dst=dst)
    return gathered


def _shape(case: pc.Case) -> tuple[int, ...]:
    """One rank's shape: ``shape``, its last axis cut into W parts if ``columns_over_world``."""
    *rest, columns = case["shape"]
    return (*rest, columns // case.world_size if case.params.get("columns_over_world") else columns)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    return (draw.bits(_shape(case), case.dtype), *collective.root_argument(case, draw))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    if rank != collective.root_of(inputs[rank]):
        return pc.exactly("own", inputs[rank][0])
    return pc.exactly("gathered", torch.stack(collective.first_arguments(inputs)))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    part, world = torch.Size(_shape(case)).numel() * case.dtype.itemsize, case.world_size
    if collective.may_be_root(case, rank):
        return pc.Cost(hbm_bytes=(1 + world) * part, egress_bytes=0, ingress_bytes=(world - 1) * part)
    return pc.Cost(hbm_bytes=part, egress_bytes=part, ingress_bytes=0)


PROBLEM = pc.Problem(
    id=6,
    slug="gather",
    title="Gather to one root with stacked output",
    category="collective",
    parallelism=("tensor", "vocabulary", "data"),
    origin="torch.distributed primitive; the gather of logits at the sampling rank, evaluation, checkpoints",
    summary=(
        "With tensors of shape S and one dtype on all ranks, rank dst returns a contiguous tensor of shape (W, *S) whose entry q is a "
        "bit copy of rank q's tensor. Every other rank returns its own tensor: the argument itself or a copy."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "ragged, tiny, empty and odd-sized tensors of random bits; roots 0, last and changing",
            pc.case("ragged_bf16", BF16, shape=(5, 7), root=0),
            pc.case("ragged_bf16_to_last", BF16, shape=(5, 7), root="last"),
            pc.case("tiny_int32", torch.int32, shape=(3,), root=0),
            pc.case("tiny_int32_to_last", torch.int32, shape=(3,), root="last"),
            pc.case("empty_bf16", BF16, shape=(0, 4), root=0),
            pc.case("odd_bytes_uint8", torch.uint8, shape=(4097,), root="any"),
        ),
        pc.preset("pkb", "the public benchmark's shape and root, dst left out", pc.case("bf16", BF16, shape=(1024, 1024))),
        pc.preset(
            "production_llama3_logits",
            "256 sequences x 128256/W logits at the sampling rank",
            pc.case("bf16", BF16, shape=(256, 128256), columns_over_world=True, root=0),
        ),
        pc.preset(
            "production_qwen3_logits",
            "64 sequences x 151936/W logits at the sampling rank",
            pc.case("bf16", BF16, shape=(64, 151936), columns_over_world=True, root=0),
        ),
        pc.preset(
            "production_checkpoint_gather", "a 67 MB shard per rank, at the last", pc.case("fp32", FP32, shape=(4096, 4096), root="last")
        ),
        *collective.sweep(lambda elements: {"shape": (elements,), "columns_over_world": True}),
    ),
    excused={"echo/own": "off the root the answer is the rank's own tensor"},
    known_wrong_answers=(
        pc.wrong("not_stacked", "the leading axes merged", collective.at_root(lambda c: c.answer.flatten(0, 1))),
        pc.wrong(
            "always_to_rank_0",
            "gathered on rank 0, whatever dst says",
            lambda c: c.answers[collective.root_of(c.args)] if c.rank == 0 else c.args[0],
            ("small/ragged_bf16_to_last", "small/tiny_int32_to_last"),
        ),
        pc.wrong("stale_part", "a late rank's tensor is that of the slot before", collective.at_root(collective.stale_part)),
    ),
    notes=(
        "In the public benchmark every slice is a constant known from the rank, always on rank 0. Here the bits are random, and dst is the "
        "first rank, the last, or another one in every slot.",
        "The public reference gathers into W temporary tensors and copies them once more to stack them. Here they arrive in place, "
        "which does not change the answer but makes the baseline faster.",
        "Where dst changes between slots, the cost charges every rank as the root; the slowest rank's bound is the right one.",
    ),
    speed_note=(
        "The public one gathers into separate tensors and copies them once more to stack them; this one gathers straight into the result."
    ),
)
