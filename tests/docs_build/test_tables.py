"""The tables of layers: the newest row of each size, and an error for a file without the part that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.report.kernels import layers_report


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row | {"gpu": "a GPU", "gpus": 2, "ranks": 2}) + "\n" for row in rows))
    return path


def test_a_table_has_the_newest_row_of_each_size(tmp_path: Path) -> None:
    times = {"ours_us": 9.0, "kit_then_norm_us": 150.0, "torch_one_shot_us": 30.0, "torch_two_shot_us": 20.0}
    newer = {"bench": "decode", "tokens": 8, **times, "ours_us": 7.25}
    path = written(tmp_path / "layers.jsonl", {"bench": "decode", "tokens": 8, **times}, {"bench": "mlp", "tokens": 8}, newer)
    report = layers_report(path, "decode")
    assert "| 8 | 7.2 | - | 150 | 20.0 |" in report
    assert report.count("| 8 |") == 1 and "Node: 2x a GPU; 2 ranks." in report


def test_sizes_in_bytes_are_spelled_out(tmp_path: Path) -> None:
    path = written(
        tmp_path / "layers.jsonl", {"bench": "all_reduce", "bytes": 8 << 20, "packets_us": 1.0, "staged_us": 2.0, "rings_us": 3.0}
    )
    assert "| 8 MiB | 1.0 | 2.0 | 3.0 | - |" in layers_report(path, "all_reduce")


def test_a_file_without_the_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no row of 'mlp': expected"):
        layers_report(written(tmp_path / "layers.jsonl", {"bench": "gather"}), "mlp")
