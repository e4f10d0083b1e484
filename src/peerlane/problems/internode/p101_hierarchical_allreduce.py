"""Problem 101: all-reduce (sum) of one tensor over the ranks of several nodes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import two_tiers
from peerlane.problems.families.collective import (
    BF16,
    FP16,
    FP32,
    all_gather_single,
    first_arguments,
    reduce_scatter_single,
    sequential_sum,
    shape_tolerance,
    stale_tail,
    sum_expected,
    summand,
    wide_sum,
)


def reference(tensor: torch.Tensor, node_group: dist.ProcessGroup, rail_group: dist.ProcessGroup) -> torch.Tensor:
    ranks = dist.get_world_size(node_group)
    flat = tensor.reshape(-1)
    padded = F.pad(flat, (0, -flat.numel() % ranks))
    part = padded.new_empty(padded.numel() // ranks)
    reduce_scatter_single(part, padded, group=node_group)
    dist.all_reduce(part, group=rail_group)
    total = torch.empty_like(padded)
    all_gather_single(total, part, group=node_group)
    return total[: flat.numel()].view(tensor.shape)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    if draw.integer:
        most = 256 // case.world_size  # every partial sum is an integer of size 256 or less, exact in bfloat16
        tensor = draw.integers(-most, most + 1, case["shape"], case.dtype)
    else:
        tensor = summand(case, rank, draw, case["shape"])
    return tensor, two_tiers.NODE, two_tiers.RAIL


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return sum_expected(first_arguments(inputs), case.dtype)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A node's sum leaves it, and the others' sums enter it, as an all-reduce over nodes needs; each rank carries its share of that."""
    elements = torch.Size(case["shape"]).numel()
    payload, world = elements * case.dtype.itemsize, case.world_size
    inside = pc.traffic.all_reduce(payload, case.cluster.ranks_per_node)
    between = pc.traffic.all_reduce(payload, case.cluster.nodes) / case.cluster.ranks_per_node
    return pc.Cost(
        hbm_bytes=2 * payload,
        egress_bytes=inside,
        ingress_bytes=inside,
        network_egress_bytes=between,
        network_ingress_bytes=between,
        flops={"fp32": (world - 1) / world * elements},
    )


def _of_ranks(ranks: Callable[[pc.AnswerContext], Sequence[int]]) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """A wrong answer: the sum over some ranks."""
    return lambda c: wide_sum([c.inputs[q][0] for q in ranks(c)])


def _rails_out_of_step(context: pc.AnswerContext) -> torch.Tensor:
    """The parts of the sum in the places of their neighbours: gathered in another order than they were scattered."""
    flat = context.answer.reshape(-1)
    return torch.cat(list(flat.tensor_split(context.case.cluster.ranks_per_node))[::-1]).view(context.answer.shape)


def _one_part_not_exchanged(context: pc.AnswerContext) -> torch.Tensor:
    """The last part of the sum without the other nodes."""
    answer: torch.Tensor = context.answer.clone()
    own = wide_sum([context.inputs[q][0] for q in two_tiers.node_of(context.case, context.rank)])
    parts = context.case.cluster.ranks_per_node
    answer.view(-1).tensor_split(parts)[-1].copy_(own.view(-1).tensor_split(parts)[-1])
    return answer


def _by_node(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Each node's sum rounded, then the sum of these: what travels between nodes has the tensor's dtype."""
    sums = [wide_sum([inputs[q][0] for q in members]) for members in case.cluster.node_groups]
    return sequential_sum(sums)


def _filled(case: pc.Case) -> bool:
    return torch.Size(case["shape"]).numel() >= case.world_size


PROBLEM = pc.Problem(
    id=101,
    slug="hierarchical_allreduce",
    title="All-reduce (sum) over several nodes",
    category="internode",
    parallelism=("data", "tensor"),
    origin="Hierarchical all-reduce of Horovod and of NCCL's trees: gradients of data parallelism over nodes (DDP, Megatron-LM)",
    summary=(
        "Every rank returns the elementwise sum of all ranks' tensors, in the input's shape and dtype and in fresh storage. The order "
        f"of the additions and the width of the accumulator are free. {two_tiers.GROUPS}"
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=shape_tolerance,
    cost=cost,
    world_sizes=two_tiers.WORLD_SIZES,
    nodes=two_tiers.NODES,
    process_groups=pc.node_and_rail,
    bandwidth="production_llama3_70b_prefill",
    presets=(
        pc.preset(
            "small",
            "ragged, tiny and empty tensors, cancellation, NaN and infinities",
            pc.case("ragged_bf16", BF16, shape=(37, 53)),
            pc.case("scalar_fp32", FP32, shape=(1,)),
            pc.case("empty_bf16", BF16, shape=(0, 8)),
            pc.case("ragged_fp16", FP16, shape=(3, 5, 7)),
            pc.case("cancelling_bf16", BF16, shape=(61, 97), data="cancelling"),
            pc.case("special_fp32", FP32, shape=(131,), data="special"),
        ),
        pc.preset("pkb", "1024 x 1024; the public benchmark has no such problem", pc.case("bf16", BF16, shape=(1024, 1024))),
        pc.preset("production_llama3_70b_prefill", "4096 tokens x hidden 8192", pc.case("bf16", BF16, shape=(4096, 8192))),
        pc.preset(
            "production_ddp_bucket",
            "a 25 MiB gradient bucket, and one of odd length",
            pc.case("fp32", FP32, shape=(6553600,)),
            pc.case("odd_fp32", FP32, shape=(6553593,)),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "the rank's own tensor", lambda c: c.args[0].clone()),
        pc.wrong("node_only", "the sum over the rank's own node", _of_ranks(lambda c: two_tiers.node_of(c.case, c.rank))),
        pc.wrong("rail_only", "the sum over the rank's own rail", _of_ranks(lambda c: two_tiers.rail_of(c.case, c.rank))),
        pc.wrong("drop_last_rank", "the sum without the last rank", _of_ranks(lambda c: c.ranks[:-1])),
        pc.wrong("parts_reversed", "parts of the sum gathered in the wrong order", _rails_out_of_step, _filled),
        pc.wrong("one_part_not_exchanged", "the last part is the sum over the rank's own node", _one_part_not_exchanged, _filled),
        pc.wrong("stale_tail", "the last elements are those of the slot before", stale_tail),
    ),
    alternative_solutions=pc.alternatives(
        fp32_accumulation=lambda case, inputs, rank: wide_sum(first_arguments(inputs)),
        sequential_in_dtype=lambda case, inputs, rank: sequential_sum(first_arguments(inputs)),
        rounded_by_node=_by_node,
    ),
    excused={**pc.any_order("a sum does not depend on the order of its terms"), "another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The reference scatters the sum within the node, adds up parts over the rails, and gathers them within the node. So the bytes "
        "between nodes meet the bound already. What is left is to overlap the three steps.",
    ),
)
