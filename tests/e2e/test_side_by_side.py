"""Runs side by side: each has GPUs and cores of its own, and none is left when any of them ends."""

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from e2e.runs import DEADLINES, GOOD, MARK, SLEEPS, Heard, marked_processes, plan_of, wait_for, within
from peerlane.errors import HarnessError
from peerlane.evaluate.evaluator import Silent
from peerlane.evaluate.selftest import run
from peerlane.evaluate.selftest.outcome import read_outcomes
from peerlane.evaluate.selftest.run import SelftestPlan, selftest
from peerlane.evaluate.selftest.side_by_side import RunResources, divide, evaluate_side_by_side
from peerlane.evaluate.selftest.table import load

HERE = RunResources((), tuple(os.sched_getaffinity(0)))
plan = partial(plan_of, isolation="L0")
slow_plan = partial(plan, deadlines=DEADLINES.with_calls(60.0))


@pytest.fixture
def lazy(tmp_path: Path) -> Path:
    path = tmp_path / "1_lazy_pytorch.py"
    path.write_text("def solution(tensor):\n    return tensor.clone()\n")
    return path


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    path = tmp_path / "1_endless_pytorch.py"
    path.write_text(SLEEPS)
    return path


@pytest.mark.parametrize(
    ("gpus", "cores", "world_size", "most", "runs"),
    [
        (4, 64, 2, 8, 2), (8, 128, 2, 8, 4), (8, 128, 2, 3, 3), (4, 64, 4, 8, 1), (4, 15, 2, 8, 1), (5, 64, 2, 8, 2), (0, 64, 2, 8, 1),
        (4, 64, 2, 0, 1),
    ],
)  # fmt: skip
def test_a_machine_is_divided_by_gpus_and_cores(gpus: int, cores: int, world_size: int, most: int, runs: int) -> None:
    found = divide([f"GPU-{number}" for number in range(gpus)], set(range(cores)), world_size, most)
    assert len(found) == runs
    for kind in ("gpus", "cores"):
        owned = [item for run in found for item in getattr(run, kind)]
        assert len(owned) == len(set(owned))
    assert all(len(run.gpus) == world_size and len(run.cores) >= 4 * world_size for run in found) or runs == 1


def test_runs_side_by_side_tell_what_happens_and_leave_nothing(lazy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "runs")
    heard = [Heard(), Heard()]
    with within(120.0):
        evaluate_side_by_side([(HERE, plan(GOOD, lazy), heard[0]), (HERE, plan(lazy), heard[1])])
    assert [[result.verdict.kind for result in one.results] for one in heard] == [["correct", "wrong_result"], ["wrong_result"]]
    assert all("first_call" in one.phases and any("isolation L0" in note for note in one.notes) for one in heard)
    assert not marked_processes("runs")


@pytest.mark.slow
def test_a_run_that_fails_ends_the_others_and_says_why(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "failing")
    with within(60.0), pytest.raises(HarnessError, match=r"beside others ended with status 1: .*nowhere"):
        evaluate_side_by_side([(HERE, slow_plan(endless), Silent()), (HERE, plan(GOOD, presets=("nowhere",)), Silent())])
    wait_for(lambda: not marked_processes("failing"), 10, "the end of all processes")


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_nothing_is_left_of_runs_whose_supervisor_is_stopped(how: signal.Signals, endless: Path) -> None:
    script = f"""
        from e2e.test_side_by_side import HERE, Silent, evaluate_side_by_side, slow_plan

        class Shown(Silent):
            def phase(self, *where):
                print(where[-1], flush=True)

        slow = slow_plan({str(endless)!r})
        evaluate_side_by_side([(HERE, slow, Shown()), (HERE, slow, Shown())])
    """
    environment = {**os.environ, MARK: f"stopped-{how.name}", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as supervisor:
        assert supervisor.stdout is not None
        with within(60.0):
            seen: Counter[bytes] = Counter()
            while seen[b"first_call\n"] < 2:
                line = supervisor.stdout.readline()
                assert line, "the supervisor ended by itself"
                seen[line] += 1
        supervisor.send_signal(how)
        supervisor.wait(30)
    wait_for(lambda: not marked_processes(f"stopped-{how.name}"), 20, "the end of all processes")


@pytest.mark.slow
def test_the_selftest_judges_side_by_side_and_keeps_every_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    corpus = load()
    chosen = corpus.select("C08,A00")
    monkeypatch.setattr(run._Run, "_resources", lambda self, world_size, due: [HERE, HERE])
    judged = selftest(SelftestPlan(corpus, chosen, "cpu", 2, tmp_path, "L0"))
    counts = Counter(outcome.file for _, outcome in judged)
    assert set(counts) >= {entry.file for entry in chosen} and min(counts[entry.file] for entry in chosen) >= 2
    assert Counter(item.file for item in read_outcomes(tmp_path / "selftest.jsonl")) == counts
    assert sum(outcome.after is None for _, outcome in judged) == 2, "each run has a first one"
