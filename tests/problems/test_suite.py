"""The suite as a whole: its size, its categories, and that nothing recorded about it beats the hardware."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peerlane import cli, problems
from peerlane.hardware.profiles import profile_for
from peerlane.hardware.roofline import datasheet_peaks, roofline
from peerlane.problems.contract import traffic
from peerlane.results.reader import read_results

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted(path for path in (ROOT / "results" / "h200x4").glob("*.jsonl") if path.name != "calibration.jsonl")


def test_size_and_categories() -> None:
    entries = json.loads(CliRunner().invoke(cli.app, ["list", "--json", "--nodes", "1"]).stdout)["problems"]
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


LATENCY_ALONE = {23}  # three scalars, whatever the model


def test_the_bandwidth_preset_is_bound_by_no_latency() -> None:
    profile = profile_for("NVIDIA H100 80GB HBM3")
    assert profile is not None
    peaks, bounds = datasheet_peaks(profile), {}
    for problem in problems.all_problems():
        case = problem.cases("bandwidth", 4)[0]
        bounds[problem.id] = roofline([problem.cost(case, rank) for rank in range(4)], peaks).bound_us
    assert {number for number, bound_us in bounds.items() if bound_us < 50} == LATENCY_ALONE


def test_the_bandwidth_preset_stands_for_a_production_preset() -> None:
    first, named = problems.get(2), problems.get(1)
    assert first.preset("bandwidth").cases == first.family("production")[0].cases
    assert named.preset("bandwidth").cases == named.preset(named.bandwidth).cases
    assert [case.preset for case in named.cases("bandwidth", 2)] == ["bandwidth"]


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_bytes_are_those_of_a_direct_exchange(members: int) -> None:
    part = 24
    whole = members * part
    to_others = sum(part for other in range(members) if other != 0)
    assert traffic.all_to_all(whole, members) == traffic.all_gather(whole, members) == traffic.reduce_scatter(whole, members) == to_others
    assert traffic.all_reduce(whole, members) == 2 * to_others
