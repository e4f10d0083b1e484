"""The stress phase on gloo ranks: enough calls in it, its evidence, and what fails in it only."""

import dataclasses

import pytest

from e2e.runs import DEADLINES, GOOD, judge
from peerlane import problems
from peerlane.evaluate import Result
from peerlane.settings import StressRules

BUDGET_S = 1.5
HONEST_FOR_A_WHILE = """
import threading

import torch.distributed as dist

calls = 0


def solution(tensor):
    global calls
    calls += 1
    total = tensor.clone()
    if calls > {at_rest} and dist.get_rank() == 1:
        {then}
    dist.all_reduce(total)
    return total
"""


FAILURES = {"hang": "threading.Event().wait()", "runtime_error": "raise ValueError", "unstable": "total *= 1.5"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """By expected verdict, the candidates that fail after the calls at rest; by name, two that are right. All from one run."""
    at_rest = 4 * len(problems.get(1).cases("small", 2))
    later = {}
    for kind, then in FAILURES.items():
        later[kind] = tmp_path_factory.mktemp(kind) / "1_later_pytorch.py"
        later[kind].write_text(HONEST_FOR_A_WHILE.format(at_rest=at_rest, then=then), encoding="utf-8")
    deadlines = dataclasses.replace(DEADLINES, calls=1.0)
    run = judge(GOOD, *later.values(), "reference", problems="1,21", stress=StressRules(budget_s=BUDGET_S), deadlines=deadlines)
    return dict(zip(["good", *later, "allreduce", "clipping"], run, strict=True))


def test_a_hundred_calls_back_to_back(results: dict[str, Result]) -> None:
    result = results["good"]
    assert result.correct, result.verdict
    timed, *others = result.correctness
    assert timed.stressed_calls >= 100 or result.stage_seconds["stress"] >= BUDGET_S
    assert result.stage_seconds["stress"] >= BUDGET_S or all(item.stressed_calls >= 100 for item in others)
    assert 0 < timed.stressed_slots <= timed.stressed_calls
    assert all(item.slots > item.stressed_slots for item in result.correctness)


def test_what_calls_update_in_place_is_restored_for_every_pass(results: dict[str, Result]) -> None:
    result = results["clipping"]
    assert result.problem.id == 21 and result.correct, result.verdict
    assert result.correctness[0].stressed_calls > 0 and result.stage_seconds["stress"] < 6


@pytest.mark.parametrize("kind", FAILURES)
def test_what_goes_wrong_after_the_calls_at_rest(kind: str, results: dict[str, Result]) -> None:
    verdict = results[kind].verdict
    assert verdict.kind == kind, verdict
    if verdict.kind == "hang":
        assert verdict.phase == "stress" and 1 in verdict.ranks
    elif verdict.kind == "runtime_error":
        assert (verdict.phase, verdict.rank) == ("stress", 1)
    elif verdict.kind == "unstable":
        assert verdict.case == problems.get(1).cases("small", 2)[0].key and verdict.wrong_slots <= verdict.compared_slots
