"""A candidate that takes too much of the machine costs one evaluation, and nobody else anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.bombs import BOMBS, LIMITS, write_bomb
from e2e.runs import GOOD, judge, within
from peerlane.sandbox import confine
from peerlane.sandbox.isolation import choose
from peerlane.sandbox.limits import Limits

QUICK = ("recursion", "disk", "memory file", "small processes")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "of_machine", classmethod(lambda cls, scratch, sharers: LIMITS))


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in BOMBS])
def test_a_bomb_costs_one_candidate(name: str, tmp_path: Path, limits: None) -> None:
    if name == "shared memory" and confine.PRIVATE_SHM not in choose(None, "cpu").measures:
        return  # nothing bounds a folder that all processes of the machine share; docs/isolation.md says so
    _, kind, sentence = BOMBS[name]
    with within(40):
        bomb, good = judge(write_bomb(name, tmp_path), GOOD)
    assert (bomb.verdict.kind, good.verdict.kind) == (kind, "correct")
    assert sentence in bomb.feedback()


def test_another_process_survives_a_hog(tmp_path: Path, limits: None) -> None:
    hold = "held = bytearray(1 << 28); print('holds', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as canary:
        assert canary.stdout is not None and canary.stdout.readline() == b"holds\n"
        (hog,) = judge(write_bomb("lists", tmp_path))
        assert hog.verdict.kind == "out_of_memory" and canary.poll() is None
        canary.communicate(b"\n", timeout=10)
    assert canary.returncode == 0


def test_a_candidates_processes_are_killed_first(tmp_path: Path) -> None:
    path = tmp_path / "1_score_pytorch.py"
    path.write_text("def solution(tensor):\n    raise ValueError('score ' + open('/proc/self/oom_score_adj').read())\n")
    (result,) = judge(path)
    assert "score 1000" in result.feedback()
