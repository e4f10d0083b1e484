"""All stages of a timed evaluation on CPU ranks, whose blocks are timed by the host's clock: what is opened, and what is left."""

from pathlib import Path

import pytest

from e2e.runs import GOOD, STRESS
from peerlane import problems
from peerlane.evaluate.candidates import candidate_file, reference_candidate
from peerlane.evaluate.node import Node
from peerlane.evaluate.pipeline import EvaluationPipeline
from peerlane.evaluate.plan import Job
from peerlane.evaluate.processes import fork_client
from peerlane.evaluate.processes.session import Session
from peerlane.settings import Deadlines, TimingRules

RULES = TimingRules(budget_s=0.3, min_rounds=3, baseline_s=0.1)
NODE = Node("run", "cuda", 2, {"gpus": [{"name": "none"}]}, None, (), 8e9)


@pytest.mark.slow
def test_a_timed_case_is_opened_twice_and_the_reference_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "RANK_PROGRAM", "e2e.host_clocks")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with Session("cpu", 2, Deadlines()) as session:
        for candidate in (candidate_file(GOOD), reference_candidate()):
            job = Job(candidate, problems.get(1), "small", 2, ("eager",))
            pipeline = EvaluationPipeline(session, job, NODE, RULES, lambda _: None, stress=STRESS)
            result = pipeline.run()
            assert result.correct and result.flags in ((), ("slower_reference",)), result.verdict
            assert [speed.status for speed in result.speed] == ["measured"]
            assert result.correctness[0].timed_slots > 0 and result.correctness[0].stressed_calls > 0
            timed = [runner.space for runner in pipeline.runners if runner.case == pipeline.runners[0].case]
            assert timed == [pipeline.runners[0].case.key, "timed"] and (result.audit is None) == candidate.is_reference
            assert (pipeline.group.present.spaces == set()) == candidate.is_reference
            pipeline.group.end()
