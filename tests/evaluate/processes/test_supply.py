"""Warm groups, builds, logs and lost GPUs: what a run keeps ready, keeps small, and keeps away from."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerlane.common.place import GPUS
from peerlane.errors import HarnessError, RunStopped
from peerlane.evaluate import EvaluationPlan, discover, evaluate, evaluator, scheduler
from peerlane.evaluate.processes import machine_faults
from peerlane.evaluate.processes.fork_server import KEPT_BYTES, LogTail
from peerlane.evaluate.processes.limit import Limit
from peerlane.evaluate.processes.pool import NoRanks, WarmPool
from peerlane.evaluate.processes.rank_group import BuildTime, GroupFailure
from peerlane.evaluate.ranks import builds
from peerlane.hardware.topology import GpuMemory, parse_smi_memory
from peerlane.results.store import ResultsStore
from peerlane.settings import PoolSettings
from sample_results import result


@dataclass
class Group:
    """A group that comes up, or fails to."""

    good: bool = True
    busy: bool = True
    lost: bool = False
    killed: bool = False
    imported_ahead: bool = False

    def finish(self) -> list[Any]:
        self.busy = False
        if not self.good:
            raise GroupFailure("exit", "spawn", "rank 0 exited with status 1", rank=0)
        return []

    def kill(self) -> None:
        self.killed = True

    def log_tail(self) -> str:
        return "[rank 0] NCCL could not"


def warm_groups(*pattern: bool, **settings: int) -> tuple[WarmPool, list[Group], list[str]]:
    """A pool, and lists of the groups that it starts, good or not as the pattern says, and of its notes."""
    made: list[Group] = []
    notes: list[str] = []
    good = iter(pattern)

    def start() -> Any:
        made.append(Group(next(good, True)))
        return made[-1]

    return WarmPool("candidate", start, PoolSettings(back_off_s=0.0, **settings), notes.append), made, notes


def test_spares_are_taken_in_the_order_of_their_start() -> None:
    queue, made, notes = warm_groups()
    queue.refill(2)
    queue.refill(2)
    assert len(made) == 2 and queue.take() is made[0] and len(queue) == 1 and notes == []


def test_missing_warm_groups_are_started_and_no_more() -> None:
    queue, made, _ = warm_groups(warm_groups=5)
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


def test_spares_without_what_a_candidate_imports_are_ended() -> None:
    queue, made, _ = warm_groups()
    queue.refill(2)
    made[1].imported_ahead = True
    queue.drop_without_imports()
    assert [group.killed for group in made] == [True, False] and len(queue) == 1 and queue.take() is made[1]


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

    def judge(self, jobs: Any) -> Iterator[Any]:
        try:
            yield from zip(jobs, self.results, strict=False)
        finally:
            self.closed = True


def test_a_full_disk_stops_the_run_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [result(candidate=result().candidate.model_copy(update={"sha256": f"{number:064d}"})) for number in range(3)]
    run = Judged(results)
    monkeypatch.setattr(scheduler.Scheduler, "judge", lambda _, jobs, *__: run.judge(jobs))
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


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts ranks."""

    class Idle:
        groups = ()

        def await_start(self) -> None: ...

        def close(self) -> None: ...

        def clear(self) -> bool:
            return False

    monkeypatch.setattr("peerlane.evaluate.processes.session.ForkServer", lambda *_: Idle())


@pytest.mark.usefixtures("idle")
def test_a_lost_gpu_leaves_the_rest_of_the_run_undone() -> None:
    plan = EvaluationPlan(discover(["reference"]), problems="1,2,4", presets=("small",), world_sizes=(2,))
    with evaluator.Evaluator(plan=plan) as run:
        run.scheduler.slots_of(2)
        run.scheduler.runner.gave_up = "GPU 1 does not answer: GPU is lost"
        results = [result for _, result in run.scheduler.judge(evaluator.make_jobs(plan))]
    assert [item.verdict.kind for item in results] == ["not_run"] * 3 and "GPU is lost" in results[2].verdict.reason


class Builder(Group):
    """Whatever it builds fails, once it is let go."""

    def __init__(self) -> None:
        super().__init__(good=False)
        self.wrong: Exception | None = None
        self.building, self.limit = BuildTime(0.0), Limit()
        self.let_go = threading.Event()

    def ask(self, request: Any, *_: Any) -> None:
        if request.op == "build_candidate":
            while not self.let_go.wait(0.005):
                self.limit.check("build")
            if self.wrong is not None:
                raise self.wrong
            self.finish()

    def admit(self, sha256: str) -> None: ...


class Building:
    """A session that has builders only; ``built`` are those that it gave. They are let go at once, unless ``held``."""

    place = GPUS
    world_size = 2
    pool_settings = PoolSettings()
    deadlines = EvaluationPlan([]).deadlines

    def __init__(self, *, held: bool = False) -> None:
        self.built: list[Builder] = []
        self.held = held

    def builder(self) -> Any:
        self.built.append(Builder())
        if not self.held:
            self.built[-1].let_go.set()
        return self.built[-1]


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def compiled(tmp_path: Path) -> Any:
    """A candidate that is to be built."""
    path = tmp_path / "1_x_cuda.py"
    path.write_text("import cupy")
    (candidate,) = discover([str(path)])
    return candidate


def others(compiled: Any, count: int) -> list[Any]:
    return [replace(compiled, sha256=f"{number:064d}", text=compiled.path.read_bytes()) for number in range(count)]


def test_a_full_disk_is_no_build_error(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs out of disk space while it compiles is not to blame."""

    class Room:
        free = 1 << 20

    session: Any = Building()
    with pytest.raises(GroupFailure):
        builds.Builds(session, 0).finish(compiled)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Room())
    with pytest.raises(HarnessError, match=r"disk of .* is full"):
        builds.Builds(session, 0).finish(compiled)


def test_what_goes_wrong_with_a_build_ahead_is_told_in_its_turn(compiled: Any) -> None:
    """There it costs one evaluation, and not the run."""
    session: Any = Building(held=True)
    ahead = builds.Builds(session, 2)
    ahead.order([compiled])
    wait_until(lambda: bool(session.built))
    session.built[0].wrong = TypeError("by a candidate")
    session.built[0].let_go.set()
    wait_until(lambda: ahead.ready(compiled))
    assert session.built[0].killed
    with pytest.raises(TypeError):
        ahead.finish(compiled)


def test_a_candidate_is_ready_when_its_build_is_done(compiled: Any) -> None:
    """It is built once; one that is compiled only when it is its turn is never waited for."""
    session: Any = Building(held=True)
    (reference,) = discover(["reference"])
    ahead = builds.Builds(session, 2)
    ahead.order([compiled, reference])
    assert ahead.ready(reference) and not ahead.ready(compiled)
    wait_until(lambda: bool(session.built))
    session.built[0].let_go.set()
    wait_until(lambda: ahead.ready(compiled))
    for _ in range(2):
        with pytest.raises(GroupFailure):
            ahead.finish(compiled)
    assert len(session.built) == 1 and builds.Builds(session, 0).ready(compiled)


def test_builds_run_as_many_at_a_time_as_asked(compiled: Any) -> None:
    session: Any = Building(held=True)
    ahead = builds.Builds(session, 3)
    ahead.order(waiting := others(compiled, 5))
    wait_until(lambda: len(session.built) == 3)
    session.built[1].let_go.set()
    wait_until(lambda: len(session.built) == 4)
    ahead.drop(waiting)
    wait_until(lambda: all(builder.killed for builder in session.built))
    assert len(session.built) == 4, "what nobody wants any more is not begun"


def test_an_import_that_hangs_leaves_its_place_to_another_build(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_PATIENCE_S", 0.05)
    session: Any = Building(held=True)
    ahead = builds.Builds(session, 1)
    first, second = others(compiled, 2)
    ahead.order([first, second])
    wait_until(lambda: bool(session.built))
    session.built[0].building.report(0, True)
    time.sleep(0.1)
    assert not ahead.ready(second) and len(session.built) == 1, "a compiler may take its time"
    session.built[0].building.report(0, False)
    wait_until(lambda: not ahead.ready(second) and len(session.built) == 2)
    ahead.close()


@pytest.mark.usefixtures("idle")
def test_what_is_still_compiled_lets_others_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["1_a_cuda.py", "1_b_pytorch.py", "1_c_pytorch.py"]
    for name in names:
        (tmp_path / name).write_text("import cupy" if "cuda" in name else "")
    one = PoolSettings(judged_at_a_time=1)
    plan = EvaluationPlan(discover([str(tmp_path / name) for name in names]), presets=("small",), world_sizes=(2,), pool_settings=one)
    turns: list[str] = []

    class Examined:
        late = False
        short_of_memory = False
        group = SimpleNamespace(healthy=False, reusable=False, no_ranks=False, end=lambda: None)

        def __init__(self, session: Any, job: Any, *_: Any, **__: Any) -> None:
            self.session, self.job = session, job

        def run(self) -> Any:
            turns.append(self.job.candidate.name)
            return result()

    monkeypatch.setattr(scheduler, "EvaluationPipeline", Examined)
    monkeypatch.setattr(builds.Builds, "order", lambda *_: None)
    monkeypatch.setattr(builds.Builds, "ready", lambda _, candidate: candidate.backend != "cuda" or len(turns) == 2)
    with evaluator.Evaluator(plan=plan) as run:
        assert len(list(run.scheduler.judge(evaluator.make_jobs(plan)))) == 3
    assert turns == ["1_b_pytorch", "1_c_pytorch", "1_a_cuda"]
