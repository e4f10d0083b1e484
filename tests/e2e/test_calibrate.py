"""Calibration on real ranks: records, resumption, and a complaint where something is unsound."""

from __future__ import annotations

from pathlib import Path

from peerlane import problems
from peerlane.evaluate.calibrate import Calibration, CalibrationPlan, calibrate, read_calibrations, sound
from peerlane.report.calibration import calibration_table


def plan(out: Path | None = None) -> CalibrationPlan:
    return CalibrationPlan(problems="2,13", presets=("small",), world_sizes=(2,), out=out)


def test_records_are_kept_and_not_made_twice(tmp_path: Path) -> None:
    out = tmp_path / "calibration.jsonl"
    made = list(calibrate(plan(out)))
    assert sound(made) and len(made) == sum(len(problems.get(number).cases("small", 2)) for number in (2, 13))
    assert read_calibrations(out) == made
    with open(out, "ab") as file:
        file.write(b'{"cut off')  # as a killed run leaves it
    assert list(calibrate(plan(out))) == [] and read_calibrations(out) == made
    gemm = next(item for item in made if item.problem == 13)
    assert 0 < max(gemm.reference.values()) < 1 and gemm.variants and min(gemm.nulls["zeros"].values()) >= 10
    table = calibration_table(made)
    assert [row[0] for row in table.rows] == ["2 allgather", "13 gemm_allreduce"] and table.rows[0][5] == "exact"


def test_infinite_ratios_survive_the_file() -> None:
    record = Calibration(
        evaluator_version="0",
        torch_version="0",
        device="cpu",
        problem=1,
        slug="allreduce",
        preset="small",
        label="a",
        variant="default",
        world_size=2,
        reference={"sum": 0.5},
        variants={},
        nulls={"zeros": {"sum": float("inf")}},
        steps=(),
        complaints=("something",),
    )
    assert Calibration.model_validate_json(record.model_dump_json()) == record and not sound([record])
