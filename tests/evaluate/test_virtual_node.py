"""Evaluations on a virtual node: who is placed where, what results say, and that no candidate pays for another one's fault."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate import EvaluationPlan, Evaluator, Result
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.correctness.ranks import Trusted
from peerlane.evaluate.job_runner import JobRunner
from peerlane.evaluate.node import Node, TooFewGpus, place_ranks
from peerlane.evaluate.pipeline import EvaluationPipeline
from peerlane.evaluate.plan import make_jobs
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.processes.session import Session
from peerlane.evaluate.worker_slots import WorkerSlot
from peerlane.hardware import virtual_node
from peerlane.hardware.virtual_node import VirtualNode
from peerlane.problems import get
from peerlane.results.verdict import HarnessFailure, NotRun, Verdict
from peerlane.settings import Deadlines

GPU = {"index": 0, "name": "NVIDIA H100", "memory_bytes": 80e9}
ENVIRONMENT = {"gpus": [GPU], "interconnect": None, "driver": "580.1", "software": {}}
MACHINE = Node("run", "cuda", 1, ENVIRONMENT, cast(Any, "a profile"), (cast(Any, "peaks"),), 80e9)
PLAN = EvaluationPlan((), device="cuda")
ANY = EvaluationPlan([candidate_text("def solution(tensor):\n    return tensor\n", 1, "any")], presets=("small",))


@pytest.fixture(autouse=True)
def with_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_node, "available_sharing", lambda: "mps")


def test_ranks_are_placed_as_the_plan_says() -> None:
    assert place_ranks(PLAN, 4, 4) is None and place_ranks(replace(PLAN, device="cpu"), 4, 0) is None
    assert place_ranks(PLAN, 4, 1) == VirtualNode(4, 1, "mps", "peerlane")
    assert place_ranks(replace(PLAN, ranks_per_gpu=2, baseline="nccl"), 4, 4) == VirtualNode(4, 2, "mps", "nccl")
    assert place_ranks(replace(PLAN, isolation="L2"), 4, 1) == VirtualNode(4, 1, "time_slices", "peerlane")
    with pytest.raises(TooFewGpus, match="4 ranks on 1 GPU, 2 ranks on each: use --ranks-per-gpu auto"):
        place_ranks(replace(PLAN, ranks_per_gpu=2), 4, 1)
    with pytest.raises(UsageError, match="references run on NCCL"):
        place_ranks(replace(PLAN, baseline="peerlane"), 4, 4)
    with pytest.raises(UsageError, match="ranks_per_gpu=9: expected less than or equal to 8"):
        replace(PLAN, ranks_per_gpu=9)


def test_a_virtual_node_is_a_class_of_its_own_without_links_to_compare_with() -> None:
    classes = set()
    for place in (
        None,
        VirtualNode(4, 1, "mps"),
        VirtualNode(4, 1, "time_slices"),
        VirtualNode(2, 1, "mps"),
        VirtualNode(2, 1, "mps", "nccl"),
    ):
        node = MACHINE.shared_by(place)
        classes.add(node.node_class)
        if place is not None:
            assert node.node_class.kind == "virtual" and node.profile is None and node.peaks == ()
            assert node.memory_bytes == 80e9 / place.ranks_per_gpu and node.environment["virtual_node"] == place.describe()
    assert len(classes) == 5
    shown = str(MACHINE.shared_by(VirtualNode(4, 1, "mps")).node_class)
    assert shown == "virtual node of 4 ranks per GPU by MPS, on peerlane baseline, 1x NVIDIA H100, driver 580"


def test_results_of_ranks_that_have_no_place_say_so() -> None:
    with Evaluator(plan=ANY) as evaluator:
        evaluator._plan = evaluator.scheduler.plan = replace(ANY, device="cuda", ranks_per_gpu=2)
        evaluator.scheduler.node = MACHINE
        (result,) = evaluator.evaluate_plan(evaluator._plan)
    assert result.verdict.kind == "not_run" and "4 ranks on 1 GPU" in result.verdict.reason


class Shared(Session):
    """One whose ranks share faults; it counts how often it had to recover."""

    recovered = 0
    shares_faults = property(lambda self: True)  # type: ignore[assignment]

    def recover_from_fault(self) -> None:
        self.recovered += 1


def judged(slot: WorkerSlot, verdict: Callable[[EvaluationPipeline], Verdict], note: Callable[[str], None] = str) -> Result:
    """The result of a candidate whose evaluations have these verdicts, each with the loss of its ranks."""

    class Scripted(EvaluationPipeline):
        def run(self) -> Any:
            self.group.healthy = False
            return self._result(verdict(self), "")

    def start(**_: Any) -> EvaluationPipeline:
        (job,) = make_jobs(ANY)
        return Scripted(slot.session, job, replace(MACHINE, device="cpu"), cast(Any, None), lambda _: None)

    return JobRunner(cast(Any, SimpleNamespace(note=note))).run(slot, start)


@pytest.mark.parametrize("again", ["not_run", "harness_error"])
def test_a_candidate_is_judged_once_more_where_an_earlier_fault_cost_it_its_ranks(again: str) -> None:
    session, notes = Shared("cpu", 4, Deadlines()), list[str]()
    lost = HarnessFailure(phase="correctness", message="CUDA error: MPS server is not ready")
    verdicts = [lost, NotRun(missing="time") if again == "not_run" else lost]
    result = judged(WorkerSlot(session), lambda _: verdicts.pop(0), notes.append)
    assert result.verdict.kind == again and not verdicts and "judged once more" in notes[0]
    assert session.recovered == 2, "before it is judged again, and for those that come next"


@pytest.mark.parametrize("after_failure", [True, False])
def test_memory_that_the_last_candidate_held_costs_the_next_one_nothing(after_failure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerlane.evaluate.job_runner._MEMORY_S", 0.0)
    tries: list[bool] = []

    def verdict(pipeline: EvaluationPipeline) -> Verdict:
        tries.append(True)
        pipeline.short_of_memory = len(tries) == 1
        return NotRun(missing="memory") if pipeline.short_of_memory else HarnessFailure(phase="correctness", message="another end")

    result = judged(WorkerSlot(Session("cpu", 4, Deadlines()), after_failure=after_failure), verdict)
    assert result.verdict.kind == ("harness_error" if after_failure else "not_run") and len(tries) == 1 + after_failure


@pytest.mark.parametrize("shared", [True, False])
def test_a_fault_that_the_trusted_ranks_share_is_the_candidates(shared: bool) -> None:
    session = Shared("cpu", 2, Deadlines()) if shared else Session("cpu", 2, Deadlines())

    def fails(*_: Any) -> None:
        raise GroupFailure("cuda_error", "correctness", "unspecified launch failure", rank=1)

    session._trusted = cast(Any, SimpleNamespace(log_tail=str, kill=lambda: None, lost=False, ask=fails))
    with pytest.raises(GroupFailure if shared else HarnessError, match="unspecified launch failure") as raised:
        Trusted(session, get(1).cases("small", 2)[0], "check").publish_inputs(1)
    if shared:
        assert cast(GroupFailure, raised.value).kind == "cuda_error" and cast(GroupFailure, raised.value).rank is None
