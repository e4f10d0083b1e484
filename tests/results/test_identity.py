"""What makes two evaluations the same, and what does not."""

from dataclasses import replace

from peerlane import problems
from peerlane.evaluate.plan import EvaluationPlan
from peerlane.hardware.virtual_node import VirtualNode
from peerlane.results.identity import NodeClass, environment_hash, hash_rules, source_hash
from peerlane.settings import TIMING_PROTOCOL, Deadlines, PoolSettings, TimingRules
from sample_results import ENVIRONMENT, on_cpu, own_audit, result


def test_it_tells_evaluations_apart() -> None:
    base = result()
    changes = [
        {"preset": "small"},
        {"world_size": 2},
        {"evaluator_version": "0.2.0"},
        {"track": "custom", "audit": own_audit()},
        {"isolation": "L0"},
        {"cases": "timed"},
        {"rules_hash": "another"},
        {"environment": {**ENVIRONMENT, "driver": "590.2"}},
        {"environment": {**ENVIRONMENT, "virtual_node": {"ranks_per_gpu": 4, "sharing": "mps"}}},
        {"environment": {**ENVIRONMENT, "virtual_node": {"ranks_per_gpu": 4, "sharing": "time_slices"}}},
        {"candidate": base.candidate.model_copy(update={"sha256": "1" * 64})},
        {"problem": base.problem.model_copy(update={"id": 2})},
        {"problem": base.problem.model_copy(update={"variant": "pkb"})},
        {"problem": base.problem.model_copy(update={"source_hash": "another"})},
    ]
    found = {base.identity, on_cpu().identity, *(result(**change).identity for change in changes)}
    assert len(found) == len({item.digest for item in found}) == len(changes) + 2


def test_it_does_not_depend_on_the_run_the_host_or_the_name() -> None:
    base = result()
    named = base.candidate.model_copy(update={"name": "sample1/1_allreduce_cuda", "labels": {"model": "m", "sample": 1}})
    same = result(run_id="another", flags=("aliased_output",), candidate=named, environment={**ENVIRONMENT, "host": "b", "driver": "580.9"})
    assert same.identity == base.identity and same.environment_hash != base.environment_hash


def test_classes_of_nodes() -> None:
    assert str(NodeClass.of(ENVIRONMENT, "cuda")) == "4x NVIDIA H200, NVLink, driver 580"
    assert NodeClass.of(ENVIRONMENT, "cpu") == NodeClass(kind="cpu") != NodeClass.of(ENVIRONMENT, "cuda")
    shared = NodeClass.of({**ENVIRONMENT, "virtual_node": {"ranks_per_gpu": 2, "sharing": "mps", "baseline": "peerlane"}}, "cuda")
    assert NodeClass.of({**ENVIRONMENT, "virtual_node": VirtualNode(4, 4, "mps").describe()}, "cuda") == NodeClass.of(ENVIRONMENT, "cuda")
    assert NodeClass.of({**ENVIRONMENT, "virtual_node": VirtualNode(8, 4, "mps").describe()}, "cuda") == shared
    assert shared.kind == "virtual" and str(shared).startswith("virtual node of 2 ranks per GPU by MPS, on peerlane baseline, 4x")


def with_variables(**variables: str) -> dict[str, object]:
    return {**ENVIRONMENT, "variables": variables}


def test_nodes_with_and_without_multicast_are_no_class() -> None:
    off = {"NCCL_NVLS_ENABLE": "0"}, {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, {}
    found = [NodeClass.of(ENVIRONMENT, "cuda"), *(NodeClass.of(with_variables(**each), "cuda") for each in off)]
    assert len(set(found)) == len(set(map(str, found))) == 4
    assert str(found[1]) == "4x NVIDIA H200, NVLink, driver 580, NVLS off, multicast allowed"
    assert [dict(node.switches())["NVLS of NCCL"] for node in found] == ["unknown", "off", "allowed", "allowed"]
    assert [node.lacks_multicast for node in found] == [False, False, True, False]
    assert len({result(environment=with_variables(**each)).identity for each in off}) == 3
    stored = NodeClass.model_validate_json('{"kind": "node", "gpu": "NVIDIA H200", "gpus": 4, "link": "NVLink", "driver": "580"}')
    assert stored == found[0], "results of earlier versions are readable, and compare with each other"


def test_ranks_that_share_a_gpu_have_no_multicast() -> None:
    shared = {"virtual_node": {"ranks_per_gpu": 4, "sharing": "mps", "baseline": "peerlane"}}
    nodes = [NodeClass.of({**environment, **shared}, "cuda") for environment in (ENVIRONMENT, with_variables())]
    assert nodes[0] == nodes[1] and nodes[0].lacks_multicast and "NVLS" not in str(nodes[0])
    assert {value for _, value in nodes[0].switches()} == {"off"} and NodeClass(kind="cpu").switches() == []
    assert not NodeClass(kind="cpu").lacks_multicast


def test_rules_are_those_that_decide() -> None:
    plan = EvaluationPlan(())
    now = hash_rules(*_rules(plan), version=TIMING_PROTOCOL)
    assert plan.rules_hash == replace(plan, pool_settings=PoolSettings(warm_groups=5)).rules_hash == now
    assert now != hash_rules(*_rules(plan), version=TIMING_PROTOCOL - 1)
    assert plan.rules_hash != replace(plan, protocol="kittens").rules_hash
    assert plan.rules_hash != replace(plan, deadlines=Deadlines(exit=7.0)).rules_hash
    assert environment_hash({"a": 1, "b": 2}) == environment_hash({"b": 2, "a": 1}) != environment_hash({"a": 1})


def _rules(plan: EvaluationPlan) -> tuple[object, ...]:
    assert isinstance(plan.rules, TimingRules)
    return plan.deadlines, plan.rules, plan.stress


def test_all_problems_differ() -> None:
    assert len({source_hash(problem) for problem in problems.suite()}) == len(problems.suite())
