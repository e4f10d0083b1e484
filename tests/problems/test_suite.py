"""The suite as a whole: its size, its categories, and that nothing recorded about it beats the hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peerlane import cli
from peerlane.report.evidence import NODE
from peerlane.results.reader import read_results

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted(path for path in (ROOT / NODE).glob("*.jsonl") if path.name != "calibration.jsonl")


def test_size_and_categories() -> None:
    entries = json.loads(CliRunner().invoke(cli.app, ["list", "--json"]).stdout)["problems"]
    assert [entry["id"] for entry in entries] == list(range(1, 88))
    assert len({entry["category"] for entry in entries}) == 12
    assert all(len(entry["presets"]) >= 3 and {2, 4} <= set(entry["world_sizes"]) for entry in entries)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_nothing_was_measured_faster_than_its_bound(path: Path) -> None:
    compared = 0
    for result in read_results(path):
        for mode in result.modes:
            speed = result.speed_in(mode)
            for item in () if speed is None else speed.utilisation:
                if item.ceilings == "datasheet":
                    compared += 1
                    assert max(item.reference, item.candidate) <= 1.0, f"{result.problem.id} {result.preset} {mode}"
    assert compared
