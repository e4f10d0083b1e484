"""A problem between nodes, for tests: an all-reduce that moves as little as it can over the network."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, sum_expected, sum_tolerance, summand, wide_sum


def reference(tensor: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup) -> torch.Tensor:
    part = tensor.new_empty(tensor.numel() // dist.get_world_size(node))
    dist.reduce_scatter_tensor(part, tensor, group=node)
    dist.all_reduce(part, group=rail)
    total = torch.empty_like(tensor)
    dist.all_gather_into_tensor(total, part, group=node)
    return total


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    return summand(case, rank, draw, case["shape"]), pc.GroupRef("node"), pc.GroupRef("rail")


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return sum_expected([tensor for tensor, *_ in inputs], case.dtype)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    return sum_tolerance(case, torch.Size(case["shape"]).numel())


def cost(case: pc.Case, rank: int) -> pc.Cost:
    payload, local, nodes = torch.Size(case["shape"]).numel() * case.dtype.itemsize, case.cluster.ranks_per_node, case.nodes
    inside, between = 2 * (local - 1) / local * payload, 2 * (nodes - 1) / nodes * payload / local
    return pc.Cost(2 * payload, inside, inside, network_egress_bytes=between, network_ingress_bytes=between)


PROBLEM = pc.Problem(
    id=1101,
    slug="two_tier_sum",
    title="All-reduce over two tiers",
    category="internode",
    parallelism=("data",),
    origin="tests",
    summary="Every rank returns the sum of all ranks' tensors.",
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=(
        pc.preset("small", "one tiny case", pc.case("fp32", FP32, shape=(96,))),
        pc.preset("pkb", "1 MB", pc.case("fp32", FP32, shape=(262144,))),
    ),
    alternative_solutions=(pc.AlternativeSolution("wide", lambda case, inputs, rank: wide_sum([tensor for tensor, *_ in inputs])),),
    world_sizes=(4, 8, 16, 32),
    nodes=(2, 4),
    process_groups=pc.node_and_rail,
    replicated=True,
    integer_exact=True,
)
