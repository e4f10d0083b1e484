"""Warm groups, builds, logs and lost GPUs: what a run keeps ready, keeps small, and keeps away from."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerlane.errors import CandidateNotFound, HarnessError, RunStopped
from peerlane.evaluate import EvaluationPlan, discover, evaluate, evaluator
from peerlane.evaluate.processes import machine_faults
from peerlane.evaluate.processes.logs import KEPT_BYTES, LogTail
from peerlane.evaluate.processes.pool import NoRanks, WarmPool
from peerlane.evaluate.processes.rank_group import GroupFailure
from peerlane.evaluate.ranks import builds
from peerlane.hardware.memory import GpuMemory, parse_smi_memory
from peerlane.place import GPUS
from peerlane.results.store import ResultsStore
from peerlane.settings import PoolSettings
from sample_results import result


@dataclass
class Group:
    """A group that comes up, or fails to."""

    number: int
    good: bool = True
    busy: bool = True
    lost: bool = False
    killed: bool = False

    def finish(self) -> list[Any]:
        self.busy = False
        if not self.good:
            raise GroupFailure("exit", "spawn", "rank 0 exited with status 1", rank=0)
        return []

    def kill(self) -> None:
        self.killed = True

    def log_tail(self) -> str:
        return "[rank 0] NCCL could not"


@dataclass
class Starts:
    """Starts groups that are good or not, as the pattern says."""

    pattern: Iterator[bool]
    made: list[Group]

    def __call__(self) -> Any:
        self.made.append(Group(len(self.made), next(self.pattern, True)))
        return self.made[-1]


def warm_groups(*pattern: bool) -> tuple[WarmPool, list[Group], list[str]]:
    made: list[Group] = []
    notes: list[str] = []
    return WarmPool("candidate", Starts(iter(pattern), made), PoolSettings(back_off_s=0.0), notes.append), made, notes


def test_spares_are_taken_in_the_order_of_their_start() -> None:
    queue, made, notes = warm_groups()
    queue.refill(2)
    queue.refill(2)
    assert len(made) == 2 and queue.take() is made[0] and len(queue) == 1 and notes == []


def test_missing_warm_groups_are_started_and_no_more() -> None:
    made: list[Group] = []
    queue = WarmPool("candidate", Starts(iter(()), made), PoolSettings(warm_groups=5), lambda _: None)
    counts = []
    for wanted in (5, 5, 2, 1):
        queue.refill(wanted)
        counts.append(len(made))
        queue.take()
    assert counts == [5, 6, 6, 6] and len(queue) == 2


def test_a_group_that_does_not_start_is_tried_again_and_said_so() -> None:
    queue, made, notes = warm_groups(False, False, True)
    queue.refill(1)
    assert queue.take() is made[2]
    assert made[0].killed and made[1].killed and len(notes) == 2 and "attempt 2 of 3" in notes[1] and "exited with status 1" in notes[1]


def test_the_last_attempt_ends_with_the_log() -> None:
    queue, made, _ = warm_groups(False, False, False)
    with pytest.raises(NoRanks, match=r"did not start in 3 attempts.*exited with status 1\n\[rank 0\] NCCL could not"):
        queue.take()
    assert all(group.killed for group in made)


def test_before_anything_is_timed_all_spares_are_up_or_gone() -> None:
    queue, made, notes = warm_groups(True, False)
    queue.refill(2)
    assert queue.wait_for_starts()
    assert not made[0].busy and made[1].killed and len(queue) == 1 and "NCCL could not" in notes[0]
    assert not queue.wait_for_starts(), "none is coming up any more"


def test_a_spare_that_was_killed_while_it_waited_is_not_handed_out() -> None:
    queue, made, notes = warm_groups()
    queue.refill(2)
    queue.wait_for_starts()
    made[0].lost = True
    assert queue.take() is made[1] and made[0].killed and "died while it waited" in notes[0]


def test_a_spare_that_cannot_be_ordered_is_a_note_until_somebody_needs_it() -> None:
    def start() -> Any:
        raise HarnessError("no space left")

    notes: list[str] = []
    queue = WarmPool("candidate", start, PoolSettings(back_off_s=0.0), notes.append)
    queue.refill(2)
    assert len(notes) == 1
    with pytest.raises(NoRanks, match="no space left"):
        queue.take()


def test_a_log_keeps_its_end_and_stays_small() -> None:
    reading, writing = os.pipe()
    file = os.memfd_create("log")
    tail = LogTail(reading, file)
    try:
        for number in range(200):
            os.write(writing, f"{number:8d}".encode() * 1024)
            assert tail.pump()
            assert os.fstat(file).st_size <= 2 * KEPT_BYTES
        size = os.fstat(file).st_size
        kept = os.pread(file, size, 0)
        assert size >= KEPT_BYTES and kept.endswith(b"     199") and kept.split() == sorted(kept.split(), key=int)
        os.close(writing)
        assert not tail.pump()
    finally:
        tail.close()
        os.close(file)


@pytest.mark.parametrize(("faults", "told"), [(("", ""), None), (("", "GPU is lost"), "GPU 1 does not answer: GPU is lost"), ((), None)])
def test_gpus_are_given_up_only_when_the_driver_says_so(faults: Any, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However full their memory is: others may have filled it. And nobody is told to reset what others use."""
    full = [GpuMemory(99 << 30, fault) for fault in faults]
    monkeypatch.setattr(machine_faults, "gpu_memory", lambda indices: full)
    said = machine_faults.lost_gpus([0, 1])
    assert (said is None) if told is None else (said is not None and told in said and "reset" not in said)


def test_memory_by_nvidia_smi() -> None:
    output = "0, 1024\n1, [GPU is lost]\n"
    assert parse_smi_memory(output, [1, 0, 2]) == (
        GpuMemory(0, "memory in use: [GPU is lost]"),
        GpuMemory(1 << 30),
        GpuMemory(0, "nvidia-smi does not list it any more"),
    )


class Judged:
    """Stands for a run that yields these results."""

    def __init__(self, results: list[Any]) -> None:
        self.results, self.closed = results, False

    def judge(self, jobs: Any, limit: Any) -> Iterator[Any]:
        try:
            yield from zip(jobs, self.results, strict=False)
        finally:
            self.closed = True


def test_a_full_disk_stops_the_run_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [result(candidate=result().candidate.model_copy(update={"sha256": f"{number:064d}"})) for number in range(3)]
    run = Judged(results)
    monkeypatch.setattr(evaluator.Evaluator, "judge", lambda _, jobs, limit: run.judge(jobs, limit))
    syncs = iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def fsync(fd: int) -> None:
        if (error := next(syncs)) is not None:
            raise error

    monkeypatch.setattr(os, "fsync", fsync)
    plan = EvaluationPlan(discover(["reference"]), problems="1,2,4", presets=("small",), world_sizes=(2,), out=tmp_path)
    with pytest.raises(RunStopped, match=r"No space left on device.*stops with 1 results stored") as caught:
        evaluate(plan)
    assert caught.value.results == results[:2] and run.closed
    assert ResultsStore(tmp_path).results() == results[:1]


def test_a_file_of_no_problem_is_named(tmp_path: Path) -> None:
    (tmp_path / "99_foo.py").write_text("def solution(): ...")
    with pytest.raises(CandidateNotFound, match=r"99_foo\.py: there is no problem 99\b"):
        discover([str(tmp_path)])


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts ranks."""

    class Idle:
        groups = ()

        def await_start(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("peerlane.evaluate.processes.session.ForkServer", lambda *_: Idle())


@pytest.mark.usefixtures("idle")
def test_a_lost_gpu_leaves_the_rest_of_the_run_undone() -> None:
    plan = EvaluationPlan(discover(["reference"]), problems="1,2,4", presets=("small",), world_sizes=(2,))
    with evaluator.Evaluator(plan=plan) as run:
        run._session_of(2)
        run._missing = "GPU 1 does not answer: GPU is lost"
        results = [result for _, result in run.judge(evaluator.make_jobs(plan))]
    assert [item.verdict.kind for item in results] == ["not_run"] * 3 and "GPU is lost" in results[2].verdict.reason


class Builder(Group):
    """Whatever it builds fails."""

    overdue = False
    answering = False
    wrong: Exception | None = None

    def finish(self) -> list[Any]:
        if self.wrong is not None:
            raise self.wrong
        return super().finish()

    def admit(self, sha256: str) -> None: ...

    def ask(self, *_: Any) -> None: ...

    def begin(self, *_: Any) -> None: ...


class Building:
    """A session that has builders only; ``built`` are those that it gave."""

    place = GPUS
    pool_settings = PoolSettings()
    deadlines = EvaluationPlan([]).deadlines

    def __init__(self) -> None:
        self.built: list[Builder] = []

    def builder(self) -> Any:
        self.built.append(Builder(0, good=False))
        return self.built[-1]


@pytest.fixture
def compiled(tmp_path: Path) -> Any:
    """A candidate that is to be built."""
    path = tmp_path / "1_x_cuda.py"
    path.write_text("import cupy")
    (candidate,) = discover([str(path)])
    return candidate


def test_a_full_disk_is_no_build_error(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs out of disk space while it compiles is not to blame."""

    class Room:
        free = 1 << 20

    session: Any = Building()
    with pytest.raises(GroupFailure):
        builds.Builds(session, []).finish(compiled)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Room())
    with pytest.raises(HarnessError, match=r"disk of .* is full"):
        builds.Builds(session, []).finish(compiled)


def test_a_build_that_takes_too_long_ends_before_its_turn(compiled: Any) -> None:
    """It runs beside the evaluations of others, and may do so to disturb them."""
    session: Any = Building()
    ahead = builds.Builds(session, [compiled])
    ahead.poll()
    (builder,) = session.built
    ahead.poll()
    assert not builder.killed
    builder.overdue = True
    ahead.poll()
    assert builder.killed
    with pytest.raises(GroupFailure):
        ahead.finish(compiled)
    assert session.built == [builder]


def test_what_goes_wrong_with_a_build_ahead_of_its_turn_is_told_of_in_its_turn(compiled: Any) -> None:
    """There it costs one evaluation, and not the run."""
    session: Any = Building()
    ahead = builds.Builds(session, [compiled])
    ahead.poll()
    session.built[0].answering, session.built[0].wrong = True, TypeError("by a candidate")
    ahead.poll()
    assert session.built[0].killed and not ahead.ready(compiled)
    with pytest.raises(GroupFailure):
        ahead.finish(compiled)
    assert len(session.built) == 2


def test_a_candidate_is_ready_when_its_build_is_done(compiled: Any) -> None:
    """Collecting it makes room for the next; one that is compiled only when it is its turn is never waited for."""
    session: Any = Building()
    (reference,) = discover(["reference"])
    ahead = builds.Builds(session, [compiled, reference])
    ahead.poll()
    assert ahead.ready(reference) and not ahead.ready(compiled)
    session.built[0].answering = True
    ahead.poll()
    assert ahead.ready(compiled) and session.built[0].killed

    alone: Any = Building()
    alone.pool_settings = PoolSettings(builds=0)
    assert builds.Builds(alone, [compiled]).ready(compiled)


@pytest.mark.usefixtures("idle")
def test_what_is_still_compiled_lets_others_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["1_a_cuda.py", "1_b_pytorch.py", "1_c_pytorch.py"]
    for name in names:
        (tmp_path / name).write_text("import cupy" if "cuda" in name else "")
    plan = EvaluationPlan(discover([str(tmp_path / name) for name in names]), presets=("small",), world_sizes=(2,))
    turns: list[str] = []

    class Examined:
        missed_deadline = False
        group = SimpleNamespace(healthy=False, reusable=False, no_ranks=False, end=lambda: None)

        def __init__(self, session: Any, job: Any, *_: Any, **__: Any) -> None:
            self.session, self.job = session, job

        def run(self) -> Any:
            turns.append(self.job.candidate.name)
            return result()

    monkeypatch.setattr(evaluator, "EvaluationPipeline", Examined)
    monkeypatch.setattr(builds.Builds, "poll", lambda _: None)
    monkeypatch.setattr(builds.Builds, "ready", lambda _, candidate: candidate.backend != "cuda" or len(turns) == 2)
    with evaluator.Evaluator(plan=plan) as run:
        assert len(list(run.judge(evaluator.make_jobs(plan)))) == 3
    assert turns == ["1_b_pytorch", "1_c_pytorch", "1_a_cuda"]
