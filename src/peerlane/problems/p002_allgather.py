"""Problem 2: all-gather with stacked output."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, all_gather_single, first_arguments, sweep


def reference(tensor: torch.Tensor) -> torch.Tensor:
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    # The flat form works on every backend; gloo refuses the stacked one.
    all_gather_single(gathered.view(-1), tensor.contiguous().view(-1))
    return gathered


def _shape(case: pc.Case) -> tuple[int, ...]:
    """One rank's shape: ``shape``, or ``whole`` cut into W parts along axis 0."""
    if "whole" in case.params:
        rows, *rest = case["whole"]
        return (rows // case.world_size, *rest)
    return tuple(case["shape"])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor]:
    return (draw.bits(_shape(case), case.dtype),)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("gathered", torch.stack(first_arguments(inputs)))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    shard, world = torch.Size(_shape(case)).numel() * case.dtype.itemsize, case.world_size
    port = (world - 1) * shard
    return pc.Cost(hbm_bytes=(1 + world) * shard, egress_bytes=port, ingress_bytes=port)


PROBLEM = pc.Problem(
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
        pc.preset(
            "small",
            "ragged, tiny, empty and odd-sized tensors of random bits",
            pc.case("ragged_bf16", BF16, shape=(5, 7)),
            pc.case("scalar_int64", torch.int64, shape=(1,)),
            pc.case("empty_bf16", BF16, shape=(3, 0)),
            pc.case("ragged_fp32", FP32, shape=(33, 17)),
            pc.case("odd_bytes_uint8", torch.uint8, shape=(4097,)),
            pc.case("ragged_uint8", torch.uint8, shape=(33, 17)),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(1024, 1024))),
        pc.preset(
            "production_llama3_8b_layer_fsdp", "the parameters of one layer, sharded, flat", pc.case("bf16", BF16, whole=(218112000,))
        ),
        pc.preset("production_llama3_70b_tp_sp", "8192/W tokens x hidden 8192", pc.case("bf16", BF16, whole=(8192, 8192))),
        pc.preset("production_small_control", "256 numbers per rank: latency", pc.case("int64", torch.int64, shape=(256,))),
        *sweep(lambda elements: {"whole": (elements,)}),
    ),
    known_wrong_answers=(pc.wrong("not_stacked", "the leading axes merged", lambda c: c.answer.flatten(0, 1)),),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    notes=(
        "The public benchmark feeds the constant r+1 on rank r, so the answer can be written without communication, and order and offsets "
        "inside a shard go untested. Here the bits are random and compared bit for bit, NaN payloads and signed zeros included.",
    ),
)
