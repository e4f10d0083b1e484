"""Virtual clusters of CPU ranks: what is right, what crosses between nodes, and what cannot be mapped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peerlane import Evaluator
from peerlane.errors import UsageError
from peerlane.evaluate import discover
from peerlane.evaluate.candidates import reference_candidate
from peerlane.evaluate.plan import EvaluationPlan, make_jobs
from peerlane.evaluate.processes.session import Session
from peerlane.hardware.virtual_node import VirtualNode
from peerlane.report.tables import reasons
from peerlane.settings import PROBLEM_FOLDERS, Deadlines, StressRules

FOLDER = Path(__file__).parent / "two_tiers"
HEAD = "import torch, torch.distributed as dist\nimport torch.distributed._symmetric_memory as symmetric\n"
SUM = f"{HEAD}def solution(tensor, node, rail):\n    total = tensor.clone()\n    dist.all_reduce(total, group=GROUP)\n    return total\n"
FLAT, NO_NETWORK = SUM.replace("GROUP", "None"), SUM.replace("GROUP", "node")
MAPS = f"{HEAD}def solution(tensor, node, rail):\n    symmetric.rendezvous(tensor, group=GROUP)\n"
ACROSS, INSIDE = MAPS.replace("GROUP", "dist.group.WORLD"), MAPS.replace("GROUP", "node")


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROBLEM_FOLDERS, str(FOLDER))
        stress = StressRules(max_slots=4, min_slots=4)
        with Evaluator(4, "cpu", nodes=2, presets=("pkb",), cases="timed", modes=("eager",), stress=stress) as made:
            yield made


def test_the_reference_moves_what_it_must_between_nodes(evaluator: Evaluator) -> None:
    result = evaluator.evaluate(1101, candidate=reference_candidate())
    assert result.correct and result.node.nodes == 2 and result.network is not None
    assert result.correctness[0].case == "1101/pkb/fp32/w2x2"
    assert [item.status for item in result.speed] == ["not_measured"]
    assert result.network.least_egress == result.network.least_ingress == 2**19
    assert 1.0 <= (result.network.over_least or 0) < 1.1
    assert any("bytes between nodes" in line and "times the bound" in line for line in reasons([result]))


def test_a_ring_through_all_ranks_moves_three_times_as_much(evaluator: Evaluator) -> None:
    result = evaluator.evaluate(1101, FLAT)
    assert result.correct and result.network is not None
    assert 2.9 < (result.network.over_least or 0) < 3.2, "1.5 payloads over each of two connections, instead of 0.5"


@pytest.mark.slow
def test_a_token_with_several_experts_crosses_once(evaluator: Evaluator) -> None:
    result = evaluator.evaluate(102, candidate=next(item for item in discover(["solutions"]) if item.problem == 102))
    assert result.correct and result.network is not None
    assert 1.0 <= (result.network.over_least or 0) < 1.1


def test_an_answer_of_one_node_is_wrong(evaluator: Evaluator) -> None:
    assert evaluator.evaluate(1101, NO_NETWORK).verdict.kind == "wrong_result"


def test_symmetric_memory_of_another_node_cannot_be_mapped(evaluator: Evaluator) -> None:
    refusal = "memory of another node cannot be mapped"
    assert refusal in evaluator.evaluate(1101, ACROSS).verdict.reason
    assert refusal not in evaluator.evaluate(1101, INSIDE).verdict.reason, "CPU ranks have none, for another reason"


def test_the_kit_refuses_memory_of_another_node_on_emulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBLEM_FOLDERS, str(FOLDER))
    source = "from peerlane.device import Arena\ndef solution(tensor, node, rail):\n    Arena(64, node)\n    Arena(64, rail)\n"
    with Evaluator(4, "emulated", nodes=2, presets=("small",)) as made:
        verdict = made.evaluate(1101, source).verdict
    assert verdict.kind == "runtime_error" and "ranks [1] are on another host than rank 0" in verdict.reason


def test_a_folder_may_hold_candidates_of_one_and_of_several_nodes() -> None:
    candidates, notes = discover(["solutions"]), list[str]()
    assert {job.problem.nodes for job in make_jobs(EvaluationPlan(candidates), notes.append)} == {(1,)}
    assert {2 in job.problem.nodes for job in make_jobs(EvaluationPlan(candidates, nodes=2), notes.append)} == {True}
    assert notes == [
        "5 problems that cannot run on 1 node left out: see --nodes",
        "87 problems that cannot run on 2 nodes left out: see --nodes",
    ]


def test_plans_and_problems_must_agree_on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBLEM_FOLDERS, str(FOLDER))
    with pytest.raises(UsageError, match="4 ranks on 3 nodes"):
        EvaluationPlan((reference_candidate(),), nodes=3)
    with pytest.raises(UsageError, match="problem 1101 does not run on 1 node: use --nodes 2 or 4"):
        make_jobs(EvaluationPlan((reference_candidate(),), problems="1101"))
    jobs = make_jobs(EvaluationPlan((reference_candidate(),), problems="all", nodes=2))
    assert 1101 in {job.problem.id for job in jobs} and all(2 in job.problem.nodes for job in jobs)
    assert 1101 not in {job.problem.id for job in make_jobs(EvaluationPlan((reference_candidate(),), problems="all"))}


def test_nccl_takes_nodes_for_hosts_that_it_reaches_by_sockets() -> None:
    told = Session("cuda", 4, Deadlines(), nodes=2)._config()
    assert told["nodes"] == 2 and told["backend"] == "nccl"
    assert [item["NCCL_HOSTID"] for item in told["rank_environment"]] == ["node0", "node0", "node1", "node1"]
    shared = Session("cuda", 4, Deadlines(), node=VirtualNode(4, 1, "time_slices"), nodes=2)._config()["rank_environment"]
    assert len({item["NCCL_HOSTID"] for item in shared}) == 4, "NCCL refuses two ranks of one host on one GPU"
    assert [item["PEERLANE_VIRTUAL_HOST"] for item in shared] == ["node0", "node0", "node1", "node1"]
    assert all(item["NCCL_NET"] == "Socket" for item in (*told["rank_environment"], *shared))
