"""Kinds of tasks and tiers of difficulty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peerlane import problems
from peerlane.report.tiers import TIERS_FILE, TIERS_SOURCE, bound_us, regime, tiers, tiers_of
from peerlane.results.reader import read_results

ROOT = Path(__file__).parents[2]


def test_tiers_are_those_of_the_committed_results() -> None:
    made = {str(number): tier for number, tier in tiers_of(read_results(ROOT / TIERS_SOURCE)).items()}
    assert json.loads(TIERS_FILE.read_text()) == {"source": TIERS_SOURCE, "tiers": made}
    assert set(tiers()) == {problem.id for problem in problems.suite()} and set(tiers().values()) == {"easy", "medium", "hard"}


@pytest.mark.parametrize(("preset", "latency"), [("pkb", True), ("bandwidth", False)])
def test_small_shapes_are_bound_by_latency(preset: str, latency: bool) -> None:
    problem = problems.get(1)
    assert (regime(bound_us(problem, problem.family(preset)[0].name if problem.family(preset) else preset, 4)) == "latency") == latency
