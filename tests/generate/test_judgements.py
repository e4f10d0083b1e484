"""Results of both versions of the record are read alike, and what differs in its setting is told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peerlane.errors import UsageError
from peerlane.generate.attempts import Speedup
from peerlane.generate.judgements import judgement, read_judgements

FIRST: dict[str, Any] = {
    "schema_version": 1,
    "candidate": {"sha256": "ab"},
    "problem": {"id": 13, "slug": "gemm_allreduce", "variant": "default"},
    "preset": "pkb",
    "world_size": 4,
    "device": "cuda",
    "track": "custom",
    "verdict": {"kind": "correct"},
    "speed": [
        {"status": "measured", "mode": "eager", "speedup": {"low": 1.1, "median": 1.2, "high": 1.3, "n": 9}},
        {"status": "not_measured", "mode": "graph", "why": "no"},
    ],
    "mechanisms": [{"name": "tma", "confidence": "seen"}, {"name": "nvls", "confidence": "possible"}],
    "environment": {"gpus": [{"name": "NVIDIA H200"}] * 4, "interconnect": "NVLink", "driver": "580.65", "cpu": {"cores": 8}},
}
SECOND = {name: value for name, value in FIRST.items() if name != "environment"} | {
    "schema_version": 2,
    "type": "result",
    "environment_hash": "cd",
    "cases": "all",
    "node": {"kind": "real", "gpu": "NVIDIA H200", "gpus": 4, "link": "NVLink", "driver": "580", "ranks_per_gpu": 1, "sharing": None},
}


def test_both_versions_say_the_same() -> None:
    first, second = judgement(FIRST), judgement(SECOND)
    assert first == second and first.speedups == {"eager": Speedup(1.1, 1.2, 1.3)} and first.mechanisms == ("tma",)
    assert str(first.setting) == "track custom, preset pkb, 4 ranks, 4x NVIDIA H200, NVLink, driver 580"


@pytest.mark.parametrize(
    "change",
    [
        {"track": "open"},
        {"preset": "small"},
        {"world_size": 2},
        {"cases": "timed"},
        {"device": "cpu"},
        {"node": {**SECOND["node"], "kind": "virtual", "ranks_per_gpu": 4, "sharing": "mps"}},
        {"problem": {**FIRST["problem"], "variant": "pkb"}},
    ],
)
def test_other_settings_are_told_apart(change: dict[str, Any]) -> None:
    assert judgement(SECOND | change).setting != judgement(SECOND).setting


def test_files_with_other_lines_are_read_and_others_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join([json.dumps({"type": "environment", "hash": "cd"}), json.dumps(SECOND), '{"schema_version": 2, "ty']))
    assert read_judgements([file]) == [judgement(SECOND)]
    file.write_text("no results\n")
    for bad in (file, tmp_path / "missing"):
        with pytest.raises(UsageError):
            read_judgements([bad])
    with pytest.raises(UsageError, match="lacks 'preset'"):
        judgement({name: value for name, value in SECOND.items() if name != "preset"})
