"""Problem 34: all-gather along the first axis."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.collective import BF16, FP32, all_gather_single, group_layout, group_members


def reference(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    rows, *rest = x.shape
    gathered = x.new_empty((dist.get_world_size(group) * rows, *rest))
    all_gather_single(gathered, x.contiguous(), group=group)
    return gathered


def _shape(case: pc.Case, ranks: int) -> tuple[int, ...]:
    """One rank's x. ``whole``: the length of axis 0 is divided by the group's size."""
    return ulysses.local_shape(case["shape"], ranks, over=0 if case.params.get("whole") else None)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    x = ulysses.payload(case, draw, _shape(case, len(group_members(case, rank))))
    return (x, ulysses.group_argument(case))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("gathered", torch.cat(ulysses.members_tensors(case, inputs, rank)))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    ranks = len(group_members(case, rank))
    shard = torch.Size(_shape(case, ranks)).numel() * case.dtype.itemsize
    port = (ranks - 1) * shard
    return pc.Cost(hbm_bytes=(1 + ranks) * shard, egress_bytes=port, ingress_bytes=port)


def _memory_order(context: pc.AnswerContext) -> torch.Tensor:
    """Every rank's elements in the order they have in memory, not in that of the axes."""
    tensors = ulysses.members_tensors(context.case, context.inputs, context.rank)
    return torch.cat([tensor.permute(*reversed(range(tensor.dim()))).reshape(tensor.shape) for tensor in tensors])


PROBLEM = pc.Problem(
    id=34,
    slug="ulysses_all_gather_into_tensor_primitive",
    title="All-gather along the first axis",
    category="sequence_parallel",
    parallelism=("sequence", "tensor", "fsdp"),
    origin="VeOmni's sequence parallelism: its wrapper of all-gather into one tensor",
    summary=(
        "With an x of one shape and dtype on all ranks of the group (the world if None), every rank returns their concatenation along "
        "axis 0 in the order of the group's ranks: a bit copy, contiguous, also where x is not. An axis of length 0 is legal; x has at "
        "least one axis."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "ragged, tiny and empty tensors of random bits, odd numbers of bytes, permuted input, a group",
            pc.case("ragged_bf16", BF16, shape=(3, 5)),
            pc.case("vector_fp32", FP32, shape=(7,)),
            pc.case("single_bf16", BF16, shape=(1,)),
            pc.case("empty_bf16", BF16, shape=(0, 4)),
            pc.case("three_axes_int32", torch.int32, shape=(2, 3, 5)),
            pc.case("odd_bytes_uint8", torch.uint8, shape=(4097,)),
            pc.case("permuted_bf16", BF16, shape=(5, 3), permuted=True),
            pc.case("strided_group_bf16", BF16, shape=(3, 5), group="strided", world_sizes=(4, 8)),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, shape=(1024, 1024))),
        pc.preset(
            "production_llama3_70b_sp", "8192 tokens x hidden 8192, before attention", pc.case("bf16", BF16, shape=(8192, 8192), whole=True)
        ),
        pc.preset("production_llama3_8b_fsdp", "the parameters of one layer, flat", pc.case("bf16", BF16, shape=(218112000,), whole=True)),
        pc.preset("production_deepseek_v3_decode", "16 tokens per rank x 7168: latency", pc.case("bf16", BF16, shape=(16, 7168))),
    ),
    known_wrong_answers=(pc.wrong("memory_order", "strides ignored", _memory_order, ("small/permuted_bf16",)),),
    excused={"another_rank": "all ranks of a group have the same answer"},
    process_groups=group_layout,
    notes=(
        "Problem 2 without its leading axis. Here with groups and inputs that are not contiguous, which the public interface allows and "
        "the public benchmark does not feed.",
    ),
)
