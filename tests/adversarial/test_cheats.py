"""Cheats and honest bugs, one file each: rejected with the right verdict, and the good candidate behind each is not affected.

The files' names begin with the row of the list of cheats (C..), bugs (B..) or legitimate oddities (A..) that they belong to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.runs import alternate, judge, marked, marked_processes
from peerlane.cli.demo import can_run, read_expectation
from peerlane.evaluate import Result

RUN = f"cheats-{os.getpid()}"  # marks this run's processes

CANDIDATES = sorted(path for path in (Path(__file__).parent / "candidates").glob("*.py") if can_run(read_expectation(path), "cpu"))


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Result, Result]]:
    with marked(RUN):
        run = judge(*alternate(CANDIDATES))
        assert marked_processes(RUN) == []
    return {cheat.candidate.name: (cheat, good) for cheat, good in zip(run[::2], run[1::2], strict=True)}


@pytest.mark.parametrize("path", CANDIDATES, ids=lambda path: path.stem)
def test_verdict(path: Path, results: dict[str, tuple[Result, Result]]) -> None:
    cheat, good = results[path.stem]
    assert cheat.verdict.kind in read_expectation(path).on("cpu"), cheat.verdict
    assert cheat.correct == (read_expectation(path).on("cpu") == ("correct",))
    assert good.correct, f"after {path.stem}: {good.verdict}"
    stored = cheat.model_dump_json()
    assert Result.model_validate_json(stored).model_dump_json() == stored, "a verdict must survive being stored"


def test_public_style_is_recognised(results: dict[str, tuple[Result, Result]]) -> None:
    """A file of the public benchmark needs no change: its backend follows from what it imports."""
    result, _ = results["1_a15_public_style"]
    assert (result.candidate.backend, result.problem.id) == ("cuda", 1)
    assert "GPU" in result.verdict.reason
