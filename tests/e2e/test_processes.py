"""No process outlives a run, however the run ends; a run that was cut short is taken up where it stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.runs import GOOD, MARK, marked, marked_processes, plan_of, processes_named, wait_for
from peerlane.results.store import ResultsStore

DAEMON_THEN_LOOP = '''
"""Leaves a daemon behind, says so, and never returns."""

import ctypes
import os
import time


def call_itself(name):
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # a confined candidate can show no other sign


if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        call_itself("{sign}-daemon")
        time.sleep(3600)
    os._exit(0)


def solution(tensor):
    call_itself("{sign}-rank")
    while True:
        pass
'''


@dataclass
class Run:
    """A ``peerlane eval`` in a process of its own, in the middle of a candidate that never returns."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    files: list[Path]

    def gone(self) -> bool:
        return marked_processes(self.mark) == []


def start(out: Path, mark: str, *files: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "peerlane", "eval", *map(str, files), "--preset", "small", "--world-size", "2", "--device", "cpu"]
    environment = {**os.environ, MARK: mark}
    return subprocess.Popen([*command, "--out", str(out)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[Run]:
    stuck = tmp_path / "1_stuck_pytorch.py"
    sign = f"t{os.getpid()}"
    stuck.write_text(DAEMON_THEN_LOOP.format(sign=sign))
    mark = tmp_path.as_posix()
    process = start(tmp_path / "out", mark, GOOD, stuck)
    try:
        signs = [f"{sign}-{which}" for which in ("daemon", "daemon", "rank", "rank")]
        wait_for(lambda: sorted(processes_named(f"{sign}-")) == signs, 60, "the candidate's start")
        wait_for(lambda: ResultsStore(tmp_path / "out").results() != [], 60, "the other's result")  # they run side by side
        assert len(marked_processes(mark)) > 6  # supervisor, fork server, leaders, ranks, daemons
        yield Run(process, mark, tmp_path / "out", [GOOD, stuck])
    finally:
        process.kill()
        process.wait()


def test_interrupt_leaves_nothing(interrupted: Run) -> None:
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.process.wait(30) == 130
    wait_for(interrupted.gone, 10, "the end of all processes")


def test_killed_supervisor_leaves_nothing_and_the_run_resumes(interrupted: Run) -> None:
    interrupted.process.kill()
    interrupted.process.wait()
    wait_for(interrupted.gone, 10, "the end of all processes")

    path = interrupted.out / "results.jsonl"
    first = path.read_bytes()
    assert [result.candidate.name for result in ResultsStore(interrupted.out).results()] == [GOOD.stem]

    other = GOOD.with_name("4_reduce_pytorch.py")
    process = start(interrupted.out, interrupted.mark, GOOD, other)
    assert process.wait(60) == 0
    assert path.read_bytes().startswith(first), "what is stored is not done again"
    results = ResultsStore(interrupted.out).results()
    assert [result.candidate.name for result in results] == [GOOD.stem, other.stem]
    assert all(result.correct for result in results)
    wait_for(interrupted.gone, 10, "the end of all processes")


def test_interrupt_inside_evaluate(tmp_path: Path) -> None:
    """KeyboardInterrupt in the calling thread ends everything before it leaves evaluate()."""
    from peerlane.evaluate import evaluate
    from peerlane.evaluate.evaluator import Silent

    class Impatient(Silent):
        def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
            if phase == "correctness":
                raise KeyboardInterrupt

    with marked(tmp_path.as_posix()), pytest.raises(KeyboardInterrupt):
        evaluate(plan_of(GOOD, out=tmp_path), Impatient())
    assert marked_processes(tmp_path.as_posix()) == []
    assert ResultsStore(tmp_path).results() == []
