"""The findings are counted from results as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.build.findings import gains, rungs_table
from peerlane.results.result import ProblemInfo
from peerlane.results.speed_record import NotMeasured
from sample_results import measured, result

ROOT = Path(__file__).parents[2]
SECOND = ProblemInfo(id=2, slug="allgather", variant="default")


def test_the_gain_of_graphs_is_the_references_alone() -> None:
    """Of two candidates beside one reference the median counts; a reference that was timed in one mode has no gain."""
    found = [
        result(speed=(measured("eager", 80.0, 10.0), measured("graph", 20.0, 10.0))),
        result(speed=(measured("eager", 120.0, 10.0), measured("graph", 30.0, 10.0))),
        result(problem=SECOND, speed=(measured("eager", 90.0, 10.0), NotMeasured(mode="graph", why="cannot be captured"))),
    ]
    (gain,) = gains(found)
    assert gain.problem == 1 and gain.eager_us == pytest.approx(100.0) and gain.graph_us == pytest.approx(25.0)
    assert gain.ratio == pytest.approx(4.0)


def test_rungs_are_told_apart_by_the_committed_outcomes() -> None:
    rows = {line.split("|")[3].strip(" `"): line.split("|")[4:6] for line in rungs_table(ROOT / "results").splitlines()[2:] if line}
    virtual, node = rows["b05_one_buffer"]
    assert set(virtual.split("`")[1::2]) == {"correct"} and set(node.split("`")[1::2]) == {"unstable"}
    assert len(rows) >= 8
