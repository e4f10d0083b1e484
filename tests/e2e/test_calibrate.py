"""Calibration on real ranks: records, resumption, and a complaint where something is unsound."""

import math
from pathlib import Path

from peerlane import problems
from peerlane.evaluate.selftest.calibrate import Calibration, CalibrationPlan, Reach, calibrate, read_calibrations, sound
from peerlane.report.selftest import calibration_table


def plan(out: Path | None = None) -> CalibrationPlan:
    return CalibrationPlan(problems="2,13", presets=("small",), world_sizes=(2,), out=out)


def test_records_are_kept_and_not_made_twice(tmp_path: Path) -> None:
    out = tmp_path / "calibration.jsonl"
    made = list(calibrate(plan(out)))
    assert sound(made) and [item.problem for item in made] == [2, 13]
    assert all(item.cases == tuple(case.label for case in problems.get(item.problem).cases("small", 2)) for item in made)
    assert read_calibrations(out) == made
    with open(out, "ab") as file:
        file.write(b'{"schema_version":1,"cut off')  # as a killed run leaves it
    assert list(calibrate(plan(out))) == [] and read_calibrations(out) == made
    failed = made[0].model_copy(update={"complaints": ("ragged_bf16: not calibrated: hang",)})
    assert made[0].finished and not failed.finished
    out.write_text("".join(item.model_dump_json() + "\n" for item in (failed, made[1])), encoding="utf-8")
    assert [item.problem for item in calibrate(plan(out))] == [2], "what could not be calibrated is done again"
    assert [item.finished for item in read_calibrations(out)] == [True, True]
    gemm = made[1]
    assert 0 < max(gemm.reference.values()) < 1 and gemm.variants and gemm.wrong_answers["zeros"].ratio >= 10
    assert gemm.weakest is not None and gemm.weakest[1].case in gemm.cases
    table = calibration_table(made)
    assert [row[0] for row in table.rows] == ["2 allgather", "13 gemm_allreduce"] and table.rows[0][4] == "exact"
    infinite = gemm.model_copy(update={"wrong_answers": {"zeros": Reach(ratio=math.inf, case="a")}, "complaints": ("something",)})
    assert Calibration.model_validate_json(infinite.model_dump_json()) == infinite and not sound([infinite])
