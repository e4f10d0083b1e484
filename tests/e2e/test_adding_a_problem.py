"""The contributor's recipe, as a new user follows it: one file is added to a checkout, and everything else finds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the documented example added, and nothing else changed."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("src", "tests/ranks", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    contract = (ROOT / "docs" / "problem-contract.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- toy:begin -->\n```python\n(.*?)```\n<!-- toy:end -->", contract, re.DOTALL)
    assert found, "docs/problem-contract.md has lost its example"
    (copy / "src" / "peerlane" / "problems" / "p900_mean.py").write_text(found[1], encoding="utf-8")
    return copy


def run(checkout: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_has_it(checkout: Path) -> None:
    entry = json.loads(run(checkout, "peerlane", "list", "--json"))["problems"][-1]
    assert entry["id"] == 900 and entry["presets"] == ["small", "pkb", "production_ddp_bucket"]


def test_the_contract_tests_take_it_up(checkout: Path) -> None:
    printed = run(checkout, "pytest", "tests/ranks", "-q", "-k", "p900")
    # Two cases on two world sizes, its declarations, and the shapes of its answers.
    assert re.search(r"^6 passed", printed, re.MULTILINE), printed


def test_the_evaluator_judges_it(checkout: Path) -> None:
    printed = run(
        checkout,
        "peerlane",
        "eval",
        "reference",
        "--problem",
        "900",
        "--preset",
        "small",
        "--world-size",
        "2,4",
        "--device",
        "cpu",
        "--json",
    )
    assert [item["verdict"]["kind"] for item in json.loads(printed)["results"]] == ["correct", "correct"]


def test_its_calibration_is_sound(checkout: Path) -> None:
    printed = run(checkout, "peerlane", "calibrate", "--problem", "900", "--world-size", "2", "--device", "cpu", "--json")
    assert [item["complaints"] for item in json.loads(printed)["calibrations"]] == [[]]


def test_its_page_is_written(checkout: Path) -> None:
    run(checkout, "peerlane", "docs", "--write")
    page = (checkout / "docs" / "problems" / "p900_mean.md").read_text(encoding="utf-8")
    assert page.splitlines()[2] == "# 900. Mean over ranks of one tensor" and "solution(tensor: torch.Tensor) -> torch.Tensor" in page
    assert "p900_mean.md" in (checkout / "docs" / "problems" / "README.md").read_text(encoding="utf-8")
