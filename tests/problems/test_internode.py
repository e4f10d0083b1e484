"""Problems 101 to 105 beyond the contract: oracles and costs against independent computations, one loop at a time."""

from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems import Case
from problem_cases import arguments, oracles

CLUSTERS = ((2, 4), (2, 8), (4, 8))


def case_of(number: int, label: str, nodes: int = 2, world_size: int = 4, preset: str = "small") -> Case:
    return problems.get(number).case(preset, label, world_size, nodes)


@pytest.mark.parametrize(("nodes", "world_size"), CLUSTERS)
def test_an_all_reduce_sends_each_element_once_per_node_and_way(nodes: int, world_size: int) -> None:
    case = case_of(101, "bf16", nodes, world_size, "pkb")
    costs = [problems.get(101).cost(case, rank) for rank in range(world_size)]
    payload = 1024 * 1024 * 2
    assert sum(cost.network_egress_bytes for cost in costs) == pytest.approx(2 * (nodes - 1) * payload)
    assert sum(cost.network_ingress_bytes for cost in costs) == pytest.approx(2 * (nodes - 1) * payload)


@pytest.mark.parametrize("number", range(101, 106))
@pytest.mark.parametrize(("nodes", "world_size"), CLUSTERS)
def test_what_leaves_nodes_enters_others(number: int, nodes: int, world_size: int) -> None:
    problem = problems.get(number)
    for case in (*problem.cases("small", world_size, nodes=nodes), *problem.cases("bandwidth", world_size, nodes=nodes)):
        costs = [problem.cost(case, rank) for rank in range(world_size)]
        for tier in ("", "network_"):
            sent, received = (sum(getattr(cost, f"{tier}{way}_bytes") for cost in costs) for way in ("egress", "ingress"))
            assert sent == pytest.approx(received), (case.name, tier)


@pytest.mark.parametrize(("nodes", "world_size"), CLUSTERS)
def test_tokens_cross_the_network_as_often_as_the_cost_says(nodes: int, world_size: int) -> None:
    case = case_of(102, "bf16", nodes, world_size, "pkb")
    inputs, per_node = arguments(case), case["experts"] // nodes
    crossings = sum(
        len({int(expert) // per_node for expert in chosen} - {case.cluster.node_of(rank)})
        for rank, args in enumerate(inputs)
        for chosen in args[1]
    )
    row = case["hidden"] * 2
    declared = sum(problems.get(102).cost(case, rank).network_egress_bytes for rank in range(world_size))
    assert declared == pytest.approx(2 * crossings * row, rel=0.02)


@pytest.mark.parametrize("label", ["skewed_fp32", "limited_bf16"])
def test_rows_go_to_experts_and_back(label: str) -> None:
    case = case_of(102, label)
    inputs, each = arguments(case), case["experts"] // case.world_size
    arrived: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(case.world_size)}
    combined = [torch.zeros(args[0].shape, dtype=torch.float64) for args in inputs]
    for expert in range(case["experts"]):
        owner = expert // each
        for source, args in enumerate(inputs):
            for token in range(len(args[0])):
                if expert in args[1][token].tolist():
                    weight = args[2][token, args[1][token].tolist().index(expert)].double()
                    combined[source][token] += weight * inputs[owner][3][len(arrived[owner])].double()
                    arrived[owner].append(args[0][token])
    for rank, (dispatched, expected) in enumerate(oracles(case, inputs)):
        assert torch.equal(dispatched.value, torch.stack(arrived[rank]))
        assert torch.allclose(expected.value, combined[rank], rtol=1e-12, atol=0)


def token(args: tuple[Any, ...], request: int, position: int) -> torch.Tensor:
    cache, table = args[:2]
    return cache[int(table[request, position // cache.shape[1]]), position % cache.shape[1]]


@pytest.mark.parametrize(("nodes", "world_size"), CLUSTERS)
def test_a_decoding_rank_has_its_requests_and_nothing_else_new(nodes: int, world_size: int) -> None:
    case = case_of(105, "ragged_bf16", nodes, world_size)
    inputs, cluster = arguments(case), case.cluster
    for rank, (returned, updated) in enumerate(oracles(case, inputs)):
        node, place = cluster.node_of(rank), cluster.local_rank(rank)
        want = inputs[rank][0].clone()
        for request in range(place, len(case["lengths"]), cluster.ranks_per_node) if node >= nodes // 2 else ():
            for position in range(case["lengths"][request]):
                shards = [token(inputs[source], request, position) for source in cluster.node_groups[node - nodes // 2]]
                token((want, *inputs[rank][1:]), request, position).copy_(torch.cat(shards, dim=1))
        assert returned is None and torch.equal(updated["cache"].value, want)


def test_attention_under_a_causal_mask_crosses_forward_alone() -> None:
    case = case_of(104, "causal_bf16", 4, 8)
    costs = [problems.get(104).cost(case, rank) for rank in range(8)]
    block = costs[0].network_egress_bytes / 3
    assert [cost.network_egress_bytes / block for cost in costs] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert [cost.network_ingress_bytes / block for cost in costs] == [0, 0, 1, 1, 2, 2, 3, 3]
