"""Tables of measurements: the newest row of each size, the smallest of several figures, and an error for a file without such rows."""

import json
from pathlib import Path

import pytest

from docs.build.sections import SECTIONS
from docs.build.tables import by_operation, read_rows, table
from peerlane.errors import UsageError


def layers(part: str, path: Path) -> str:
    return SECTIONS[f"layers_{part}"][1](path)


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row | {"gpu": "a GPU", "gpus": 2, "ranks": 2}) + "\n" for row in rows))
    return path


def test_a_table_has_the_newest_row_of_each_size(tmp_path: Path) -> None:
    times = {"ours_us": 9.0, "kit_then_norm_us": 150.0, "torch_one_shot_us": 30.0, "torch_two_shot_us": 20.0}
    newer = {"bench": "decode", "tokens": 8, **times, "ours_us": 7.25}
    path = written(tmp_path / "layers.jsonl", {"bench": "decode", "tokens": 8, **times}, {"bench": "mlp", "tokens": 8}, newer)
    report = layers("decode_of_two_h200", path)
    assert "| 8 | 7.2 | - | 150 | 20.0 |" in report
    assert report.count("| 8 |") == 1 and "Node: 2x a GPU; 2 ranks." in report


def test_sizes_in_bytes_are_spelled_out(tmp_path: Path) -> None:
    path = written(
        tmp_path / "layers.jsonl", {"bench": "all_reduce", "bytes": 8 << 20, "packets_us": 1.0, "staged_us": 2.0, "rings_us": 3.0}
    )
    assert "| 8 MiB | 1.0 | 2.0 | 3.0 | - |" in layers("all_reduce_of_two_h100", path)


def test_a_run_of_both_modes_is_one_row_and_no_run_is_said(tmp_path: Path) -> None:
    _, show = SECTIONS["batch_invariance"]
    assert show(tmp_path / "none.jsonl") == "No run is recorded here.\n"
    bits = [{"batch_invariant": bool(on), "numbers_of_rows": 64, "numbers_that_differ": 3 * (1 - on)} for on in (0, 1)]
    rows = [{"operator": "all_reduce", **row} for row in (*bits, {"m": 8, "off_us": 5.0, "on_us": 6.0})]
    path = written(tmp_path / "bits.jsonl", *rows, {"check": "tiles"})
    assert "| `all_reduce` | 3 of 64 | 0 of 64 | 5.0 / 6.0 | - | - |" in show(path)


def test_a_page_declares_columns_by_keys_or_functions() -> None:
    columns = {"name": "name", "kit / NCCL": "ours_us / nccl_us", "twice": lambda row: str(2 * row["ours_us"])}
    rows = [{"name": "a", "ours_us": 1.0, "nccl_us": 250.4}, {"name": "b", "ours_us": 2.0}]
    assert table(rows, columns, words=("name",)).splitlines() == [
        "| name | kit / NCCL | twice |",
        "| --- | ---: | ---: |",
        "| a | 1.0 / 250 | 2.0 |",
        "| b | 2.0 | 4.0 |",
    ]


def test_operations_are_columns_and_sizes_rows(tmp_path: Path) -> None:
    place = {"environment": {"gpus": [], "cpu": {"cores": 1}, "software": {"torch": "2", "nccl": "3"}}, "world_size": 2}
    rows = [
        {"op": "all_gather", "bytes": 2 << 20, "kit": {"median_us": 5.0}},
        {"op": "all_gather", "bytes": 1 << 20, "kit": {"median_us": 4.0}},
        {"op": "gather", "bytes": 1 << 20, "kit": {"median_us": 3.0}},
    ]
    (tmp_path / "rows.json").write_text(json.dumps({**place, "rows": rows}))
    lines = by_operation(tmp_path / "rows.json", "op", "kit_us").splitlines()
    assert lines[0] == "| size | all-gather | gather |" and lines[2:4] == ["| 1 MiB | 4.0 | 3.0 |", "| 2 MiB | 5.0 | - |"]
    assert lines[-1].endswith("2 ranks; torch 2, nccl 3.")


def test_a_file_without_such_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no row with .*'mlp'.*: expected"):
        layers("mlp_of_two_h200", written(tmp_path / "layers.jsonl", {"bench": "gather"}))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UsageError, match="holds no rows of a measurement"):
        read_rows(tmp_path / "other.json")
