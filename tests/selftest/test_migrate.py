"""Records of version 1, as the evaluator wrote them, become records of version 2 and lose nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from peerlane.errors import UsageError
from peerlane.results.migrate import migrate_result
from peerlane.results.reader import ResultsReader, read_results
from peerlane.selftest.calibrate import read_calibrations
from peerlane.selftest.migrate import migrate_file
from peerlane.selftest.outcome import read_outcomes

LINES = (Path(__file__).parents[1] / "results" / "version_1.jsonl").read_text().splitlines()
"""a result, an outcome, an outcome from before stages were recorded, a calibration"""
RESULT: dict[str, Any] = json.loads(LINES[0])


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "old.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_a_result(tmp_path: Path) -> None:
    migrate_file(file_of(tmp_path, LINES[0], LINES[0]), tmp_path / "results.jsonl")
    first, _ = read_results(tmp_path)
    old, new = RESULT["speed"][0], first.speed_in("eager")
    assert first.correct and first.finished_at.isoformat().startswith(RESULT["finished_at"][:19]) and new is not None
    assert first.environment == {**RESULT["environment"], "isolation_measures": RESULT["isolation_measures"]}
    assert str(first.node) == "2x NVIDIA H200, NVLink, driver 580" and first.rules_hash is None
    assert [item.max_error_over_tolerance for item in first.correctness] == [item["worst_ratio"] for item in RESULT["correctness"]]
    assert first.stage_seconds == RESULT["phases_s"]
    for name in ("speedup", "reference_us", "candidate_us"):
        assert getattr(new, name).model_dump() == old[name]
    assert (new.calls_per_block, new.rounds, new.noise_floor) == (old["slots_per_block"], old["rounds"], old["noise_floor"])
    assert new.candidate_blocks_us == pytest.approx([us * old["slots_per_block"] for us in old["candidate_blocks_us"]])
    left = first.diagnostics["version_1"]["speed"]["eager"]
    assert left["outer_slack_us"] == old["outer_slack_us"] and left["scored_by"] == old["scored_by"] and "rounds" not in left


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"kind": "tampered", "phase": "timing", "what": "the clock"}, {"kind": "integrity_failure", "what": "the clock"}),
        ({"kind": "policy", "what": "calls NCCL"}, {"kind": "track_violation", "what": "calls NCCL"}),
        ({"kind": "not_run", "missing": "a GPU"}, {"kind": "not_run", "missing": "a GPU"}),
        (
            {
                "kind": "wrong_result",
                "case": "1/small/a/w2",
                "phase": "stress",
                "rank": 0,
                "slot": 1,
                "output": "sum",
                "error_ratio": "Infinity",
                "detail": "x",
                "got": "NaN",
                "expected": "-Infinity",
                "wrong_ranks": [0],
            },
            {"kind": "wrong_result", "error_over_tolerance": math.inf, "expected": -math.inf},
        ),
    ],
)
def test_verdicts(old: dict[str, Any], new: dict[str, Any]) -> None:
    verdict = migrate_result({**RESULT, "verdict": old, "speed": [], "correctness": []}).verdict
    assert {name: getattr(verdict, name) for name in new} == new
    if old["kind"] == "wrong_result":
        assert math.isnan(verdict.got)  # type: ignore[union-attr, arg-type]


def test_outcomes_and_calibrations(tmp_path: Path) -> None:
    migrate_file(file_of(tmp_path, *LINES[1:3]), tmp_path / "selftest.jsonl")
    staged, older = read_outcomes(tmp_path / "selftest.jsonl")
    assert staged.verdict == "integrity_failure" and staged.stage_seconds == json.loads(LINES[1])["phases_s"]
    assert older.stage_seconds == {"total": older.seconds} and older.seconds == json.loads(LINES[2])["seconds"]
    file_of(tmp_path, LINES[3])
    migrate_file(tmp_path / "old.jsonl", tmp_path / "calibration.jsonl")
    (record,) = read_calibrations(tmp_path / "calibration.jsonl")
    assert record.wrong_answers["nan"].ratio == math.inf and "Infinity" not in (tmp_path / "calibration.jsonl").read_text()
    assert record.wrong_answers.keys() == json.loads(LINES[3])["nulls"].keys()


def test_in_place_the_old_file_is_kept_and_what_is_new_stays(tmp_path: Path) -> None:
    migrate_file(file_of(tmp_path, LINES[0]), tmp_path / "new.jsonl")
    new = (tmp_path / "new.jsonl").read_text().splitlines()
    mixed = file_of(tmp_path, *new, LINES[0], "garbage")
    before = mixed.read_bytes()
    done = migrate_file(mixed)
    assert (done.migrated, done.kept, len(done.left_out)) == (1, 2, 1) and "line 4" in done.left_out[0]
    assert (tmp_path / "old.jsonl.v1").read_bytes() == before
    assert len(read_results(mixed)) == 2 and ResultsReader(mixed).notes() == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    old = file_of(tmp_path, LINES[0])
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UsageError, match="taken exists"):
        migrate_file(old, tmp_path / "taken")
    with pytest.raises(UsageError, match="holds no records of version 1"):
        migrate_file(file_of(tmp_path, "garbage"))
    with pytest.raises(UsageError, match="No such file"):
        migrate_file(tmp_path / "absent")
    assert (tmp_path / "taken").read_text() == "mine" and old.read_text() == "garbage\n"
