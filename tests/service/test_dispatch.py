"""Plans on other machines: a service, a farm of nodes, and a stand-in for Slurm."""

import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import peerlane as pl
from e2e.runs import RIGHT, Heard, wait_for
from peerlane.errors import RunStopped, UsageError
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.evaluator import Silent
from peerlane.evaluate.plan import EvaluationPlan, make_jobs
from peerlane.results.identity import NodeClass, source_hash
from peerlane.results.result import ProblemInfo
from peerlane.results.store import ResultsStore
from peerlane.service.dispatch import choose_dispatcher
from peerlane.service.dispatch.batch import batch_plan, write_result
from peerlane.service.dispatch.by_slurm import SlurmDispatcher
from peerlane.service.dispatch.collect import group
from peerlane.service.dispatch.farm import Farm, FarmSettings
from peerlane.service.dispatch.launch import BatchTask, CheckTask, run_batch
from peerlane.service.node_check import NodeReport
from sample_results import ENVIRONMENT, on_cpu, wrong
from service.stand_in import TOKEN, serving

TESTS = Path(__file__).parents[1]


def plan_of(sources: Iterable[str], out: Path, **changes: Any) -> EvaluationPlan:
    candidates = tuple(candidate_text(f"{source}  # {number}\n", 1, f"c{number}") for number, source in enumerate(sources))
    return EvaluationPlan(candidates, presets=("small",), world_sizes=(2,), device="cpu", out=out, **changes)


def stand_in(folder: Path, plan: EvaluationPlan, **changes: Any) -> FarmSettings:
    """Nodes whose processes are stand-ins; the folder holds what they tell."""
    folder.mkdir()
    problem = ProblemInfo(id=1, slug="allreduce", variant="default", source_hash=source_hash(pl.problem(1)))
    same: dict[str, Any] = {"problem": problem, "world_size": 2, "preset": "small", "rules_hash": plan.rules_hash, "device": "cpu"}
    for name, result in (("right", on_cpu(**same)), ("wrong", wrong(**same))):
        (folder / f"{name}.json").write_text(write_result(result))
    for name, device, faults in (("cpu", "cpu", ()), ("gpu", "cuda", ()), ("unfit", "cpu", ("it accepts a cheat",))):
        node = NodeClass.of(ENVIRONMENT, device)
        told = {"classes": {"2": node.model_dump()}, "isolation": "L1", "rules_hash": plan.rules_hash, "evaluator_version": pl.__version__}
        report = NodeReport(str(node), faults, 6, (), told)
        (folder / f"{name}.json").write_text(json.dumps(report.to_json()))
    script = (sys.executable, "-S", str(TESTS / "service" / "batch_stand_in.py"))
    command, check_command = (*script, "judge", str(folder)), (*script, "check", str(folder), "cpu")
    return FarmSettings(**{"batch": 2, "grace_s": 4.0, "command": command, "check_command": check_command, **changes})


def judged(marks: Path) -> Counter[str]:
    file = marks / "judged"
    return Counter(file.read_text().split()) if file.exists() else Counter()


def test_a_run_on_a_service_is_stored_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_TOKEN", TOKEN)
    plan = plan_of(["# right"] * 6 + ["# wrong"], tmp_path / "out", modes=("eager", "graph"), isolation="L0")
    with serving(tmp_path / "service") as running:
        results = choose_dispatcher(running.url).run(plan, Silent())
        assert [(item.candidate.name, item.correct) for item in results] == [(f"c{n}", n < 6) for n in range(7)]
        assert len(ResultsStore(tmp_path / "out").results()) == 7 and sum(running.judged.values()) == 7
        with pytest.raises(UsageError, match="judges on 2 ranks"):
            choose_dispatcher(running.url).run(replace(plan, world_sizes=(8,)), Silent())
    for place, told in (("nowhere", "expected local"), ("ftp://host", "expected local")):
        with pytest.raises(UsageError, match=told):
            choose_dispatcher(place)


class Processes:
    """A cluster of this machine's processes; a node can be lost."""

    def __init__(self, names: Iterable[str], kinds: dict[str, str] | None = None) -> None:
        self.names, self.kinds = set(names), kinds or {}
        self._running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._numbers = itertools.count()

    def nodes(self) -> set[str]:
        return set(self.names)

    def _start(self, node: str, command: tuple[str, ...], given: bytes) -> int:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
        process.stdin = None
        number = next(self._numbers)
        self._running[number] = node, process
        return number

    def judge(self, node: str, task: BatchTask) -> object:
        return self._start(node, task.command, task.plan)

    def check(self, node: str, task: CheckTask) -> object:
        kind = self.kinds.get(node, task.command[-1])
        return self._start(node, (*task.command[:-1], kind), json.dumps(task.asked).encode())

    def finished(self, handles: Iterable[Any], seconds: float) -> list[tuple[object, Any, str | None]]:
        found: list[tuple[object, Any, str | None]] = []
        for handle in handles:
            node, process = self._running[handle]
            if node not in self.names:
                process.kill()
            try:
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                continue
            rows = [json.loads(line) for line in out.splitlines()]
            fault = None if process.returncode == 0 else f"status {process.returncode}"
            found.append((handle, rows[0] if rows and "faults" in rows[0] else rows, fault))
        return found

    def cancel(self, handle: Any) -> None:
        self._running[handle][1].kill()
        self._running[handle][1].wait()


def test_classes_of_nodes_are_never_mixed(tmp_path: Path) -> None:
    """The class that most nodes have is taken; the others are left out and told. A later run takes no other class."""
    plan, heard = plan_of(["# right"] * 4, tmp_path / "out"), Heard()
    settings = stand_in(tmp_path / "marks", plan)
    results = Farm(Processes("abc", {"b": "gpu"}), plan, heard, settings).run()
    assert {str(item.node) for item in results} == {"CPU ranks"} and len(results) == 4
    assert any("node b is left out: its class differs: 4x NVIDIA H200" in note for note in heard.notes)
    more = plan_of(["# right"] * 5, tmp_path / "out")
    with pytest.raises(RunStopped, match="its class differs"):
        Farm(Processes("b", {"b": "gpu"}), more, heard, settings).run()


def test_a_node_that_is_unfit_gets_nothing(tmp_path: Path) -> None:
    plan = plan_of(["# right"], tmp_path / "out")
    with pytest.raises(RunStopped, match="it accepts a cheat"):
        Farm(Processes("a", {"a": "unfit"}), plan, Silent(), stand_in(tmp_path / "marks", plan)).run()
    assert not judged(tmp_path / "marks")


def test_what_hangs_is_cancelled_and_what_never_ends_is_told(tmp_path: Path) -> None:
    plan = plan_of(["# hangs", "# right", "# wrong"], tmp_path / "out", timeout=0.5)
    settings = stand_in(tmp_path / "marks", plan, batch=1, grace_s=1.5, nodes_s=2.0)
    results = Farm(Processes("a"), plan, Silent(), settings).run()
    assert [item.correct for item in results] == [True, True, False] and judged(tmp_path / "marks")["c0"] == 2
    never = plan_of(["# sleeps 60", "# right"], tmp_path / "never", timeout=0.1)
    with pytest.raises(RunStopped, match="no result of 1 evaluation") as stopped:
        Farm(Processes("a"), never, Silent(), replace(settings, tries=1, grace_s=1.0)).run()
    assert [item.candidate.name for item in stopped.value.results] == ["c1"]


@pytest.mark.slow
def test_a_batch_is_judged_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The real one, on CPU ranks."""
    plan = plan_of([RIGHT, "def solution(tensor):\n    return tensor.clone()"], tmp_path, modes=())
    (jobs,) = group(make_jobs(plan), 4)
    rows = run_batch(BatchTask(pickle.dumps(batch_plan(plan, jobs)), 120.0))
    assert [pl.Result.model_validate(row).verdict.kind for row in rows] == ["correct", "wrong_result"]


SLURM = {
    "sbatch": """
grep -q partition=full "$1" && { echo "sbatch: error: the partition is full" >&2; exit 1; }
script=$(dirname "$0")/script
cp "$1" "$script"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
for task in $(seq 0 "$last"); do SLURM_JOB_ID=7$task SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task bash "$script" >/dev/null 2>&1 & done
echo Submitted batch job 7""",
    "srun": 'shift 5; exec "$@"',
    "sacct": "echo 'JobID|State|NodeList'",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of submitit
def test_a_slurm_array_gives_all_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With submitit and a stand-in for Slurm's commands, which runs all tasks here; the second run submits nothing."""
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    plan = plan_of(["# right", "# wrong", "# right"], tmp_path / "out")
    settings = stand_in(tmp_path / "marks", plan, batch=2)
    with pytest.raises(UsageError, match="no sbatch and no srun"):
        SlurmDispatcher("gpu", settings)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for _ in range(2):
        results = SlurmDispatcher("gpu", settings).run(plan, Silent())
        assert [item.correct for item in results] == [True, False, True]
        assert set(judged(tmp_path / "marks").values()) == {1}
    script = (tmp_path / "script").read_text()
    for option in ("exclusive", "requeue", "partition=gpu", "nodes=1", "ntasks-per-node=1", "array=0-1%2"):
        assert f"#SBATCH --{option}\n" in script
    with pytest.raises(UsageError, match="the partition is full"):
        SlurmDispatcher("full", settings).run(replace(plan, out=tmp_path / "other"), Silent())


@pytest.mark.slow
def test_a_batch_ends_with_a_worker_that_is_killed() -> None:
    """Its stdin stays open here, so that it does not end for want of a plan."""

    def waits_for_its_plan() -> bool:
        before = (batch / "stat").read_text().split()
        time.sleep(0.3)
        return before[2] == "S" and before == (batch / "stat").read_text().split()

    reading, writing = os.pipe()
    start = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:], stdin=0).pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", start, *BatchTask(b"", 1.0).command]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        batch = Path("/proc") / worker.stdout.readline().strip()
        wait_for(waits_for_its_plan, 30, "a batch that waits for its plan")
        worker.kill()
        wait_for(lambda: not batch.exists() or "State:\tZ" in (batch / "status").read_text(), 10, "its end")
    for descriptor in (reading, writing):
        os.close(descriptor)
