"""A candidate that takes too much of the machine costs one evaluation, and nobody else anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.runs import GOOD, judge, within
from peerlane.sandbox import confine
from peerlane.sandbox.isolation import choose
from peerlane.sandbox.limits import Limits

LIMITS = Limits(memory_bytes=900 << 20, processes=400, disk_bytes=64 << 20)
BOMBS = {
    "recursion": (
        "import sys; sys.setrecursionlimit(1 << 30)\n    def deeper(n):\n        return deeper(n + 1)\n    deeper(0)",
        "out_of_memory",
        "its limit is 900 MiB",
    ),
    "lists": ("kept = []\n    while True: kept.append(bytearray(1 << 20))", "out_of_memory", "its limit is 900 MiB"),
    "processes": (
        "import os, time\n    while True:\n        time.sleep(0.01)\n        os.fork()",
        "runtime_error",
        "processes and threads; its limit is 400",
    ),
    "disk": (
        "import os, tempfile, time\n    with tempfile.TemporaryFile() as file:\n"
        "        while True:\n            os.write(file.fileno(), bytes(1 << 20)); time.sleep(0.005)",
        "runtime_error",
        "to disk; its limit is 64 MiB",
    ),
    "shared memory": (
        "import os, time\n    with open(f'/dev/shm/peerlane-{os.getpid()}', 'wb', 0) as file:\n"
        "        os.unlink(file.name)\n        while True:\n            file.write(bytes(4 << 20)); time.sleep(0.005)",
        "out_of_memory",
        "its limit is 900 MiB",
    ),
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "of_machine", classmethod(lambda cls, scratch: LIMITS))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_one_candidate(name: str, tmp_path: Path, limits: None) -> None:
    if name == "shared memory" and confine.PRIVATE_SHM not in choose(None, "cpu").measures:
        return  # nothing bounds a folder that all processes of the machine share; docs/isolation.md says so
    code, kind, sentence = BOMBS[name]
    path = tmp_path / "1_bomb_pytorch.py"
    path.write_text(f"def solution(tensor):\n    {code}\n")
    with within(40):
        bomb, good = judge(path, GOOD)
    assert (bomb.verdict.kind, good.verdict.kind) == (kind, "correct")
    assert sentence in bomb.feedback()


def test_another_process_survives_a_hog(tmp_path: Path, limits: None) -> None:
    hold = "held = bytearray(1 << 28); print('holds', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as canary:
        assert canary.stdout is not None and canary.stdout.readline() == b"holds\n"
        path = tmp_path / "1_hog_pytorch.py"
        path.write_text(f"def solution(tensor):\n    {BOMBS['lists'][0]}\n")
        (hog,) = judge(path)
        assert hog.verdict.kind == "out_of_memory" and canary.poll() is None
        canary.communicate(b"\n", timeout=10)
    assert canary.returncode == 0


def test_a_candidates_processes_are_killed_first(tmp_path: Path) -> None:
    path = tmp_path / "1_score_pytorch.py"
    path.write_text("def solution(tensor):\n    raise ValueError('score ' + open('/proc/self/oom_score_adj').read())\n")
    (result,) = judge(path)
    assert "score 1000" in result.feedback()
