"""What comes up before the session that takes it; mostly with a stand-in for the fork server, which is up at once, or never."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate import EvaluationPlan, evaluate
from peerlane.evaluate.candidates import reference_candidate
from peerlane.evaluate.processes import prestart
from peerlane.evaluate.processes.fork_client import ForkServer, fork_server_environment
from peerlane.evaluate.processes.prestart import early_start
from peerlane.evaluate.processes.session import Session
from peerlane.sandbox.confine import Confinement
from peerlane.sandbox.isolation import Isolation
from peerlane.settings import Deadlines


def stand_in(code: str) -> Isolation:
    """Runs this in place of the fork server; ``orders`` is its socket."""
    start = f"import json, socket, sys, time; orders = socket.socket(fileno=int(sys.argv[-2])); {code}"
    return Isolation("L0", Confinement(), {}, (sys.executable, "-c", start))


ORDERS = "map(json.loads, iter(lambda: orders.recv(1 << 16), b''))"
UP = stand_in(f"orders.send(b'ready'); [orders.send(order['end'].encode()) for order in {ORDERS} if 'end' in order]")
COMING_UP = stand_in("time.sleep(600)")
BROKEN = stand_in("sys.exit('out of luck')")


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the folders of runs are made; none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [] and not prestart._waiting


@contextmanager
def early(isolation: Isolation) -> Iterator[None]:
    """Something comes up at this isolation, before the session that takes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prestart, "choose", lambda *_: isolation)
        with early_start("cpu", None):
            yield


def session(isolation: Isolation, device: str = "cpu") -> Session:
    return Session(device, 1, Deadlines(), isolation=isolation)


@pytest.mark.parametrize("module", ["evaluate.selftest.side_by_side", "cli.evaluation"])
def test_what_starts_a_fork_server_does_not_import_torch(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys, peerlane.{module}; assert 'torch' not in sys.modules"], check=True)


def test_sessions_of_the_block_take_it_one_after_the_other() -> None:
    with early(UP):
        waiting = prestart._waiting[0]
        for device in ("cpu", "emulated"):
            with session(UP, device) as taking:
                assert taking.fork_server is waiting and not prestart._waiting
        with session(UP) as first, session(UP) as second:
            assert first.fork_server is waiting and second.fork_server is not waiting
        assert len(prestart._waiting) == 2
        with session(UP), session(UP), session(UP):
            pass
        assert len(prestart._waiting) == 2, "so many wait at most"
    assert not waiting.alive
    with session(UP) as alone:
        assert alone.fork_server.alive
    assert not alone._fork_server


def test_one_that_was_killed_is_not_kept() -> None:
    with early(UP):
        with session(UP) as first:
            os.kill(first.fork_server.pid, signal.SIGKILL)
            first.fork_server._process.wait()
        assert not prestart._waiting


@pytest.mark.slow
def test_an_evaluator_starts_one_for_all_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    launched: list[ForkServer] = []
    launch = ForkServer._launch
    monkeypatch.setattr(ForkServer, "_launch", lambda made: [launched.append(made), launch(made)])
    plan = EvaluationPlan([reference_candidate()], problems="1", presets=("small",), world_sizes=(2, 4), modes=(), cases="timed")
    assert [result.verdict.kind for result in evaluate(plan)] == ["correct", "correct"]
    assert len(launched) == 1 and not launched[0].alive


def test_it_may_outlive_the_block() -> None:
    with early(UP):
        taken = session(UP).__enter__()
    assert taken.fork_server.alive
    taken.__exit__(None, None, None)


@pytest.mark.parametrize("differs", ["isolation", "device", "variables"])
def test_what_a_session_cannot_use_is_ended(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with early(COMING_UP):
        waiting = prestart._waiting[0]
        with monkeypatch.context() as changed:
            if differs == "variables":
                changed.setenv("NCCL_DEBUG", "INFO")
            environment = fork_server_environment("cuda" if differs == "device" else "cpu")
            isolation = UP if differs == "isolation" else COMING_UP
            assert prestart.take(environment, isolation) is None
        assert not waiting.alive and not prestart._waiting


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("isolation", [UP, COMING_UP, BROKEN])
def test_what_nobody_takes_is_ended_at_once(isolation: Isolation, ending: type[BaseException] | None) -> None:
    begin = time.monotonic()
    with nullcontext() if ending is None else pytest.raises(ending), early(isolation):
        (waiting,) = prestart._waiting
        if ending is not None:
            raise ending
    assert not waiting.alive and time.monotonic() - begin < 4


def test_what_fails_early_is_left_to_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(*_: object) -> Isolation:
        raise UsageError("isolation L1 is not possible")

    monkeypatch.setattr(prestart, "choose", impossible)
    with early_start("cpu", "L1"):
        assert not prestart._waiting
    with early_start("cpu", "L2"):
        assert not prestart._waiting


@pytest.mark.parametrize("is_early", [True, False])
def test_one_that_does_not_come_up_is_told_by_the_session(is_early: bool) -> None:
    told = pytest.raises(HarnessError, match="starts ranks did not come up: out of luck")
    with early(BROKEN if is_early else UP), told, session(BROKEN):
        pass


def test_the_deadline_counts_from_the_start() -> None:
    fork_server = ForkServer({}, 0.3, UP)
    time.sleep(0.5)
    fork_server.await_start()  # it has been up for long
    fork_server.close()
    fork_server = ForkServer({}, 0.3, COMING_UP)
    time.sleep(0.3)
    begin = time.monotonic()
    with pytest.raises(HarnessError, match="did not come up"):
        fork_server.await_start()
    assert time.monotonic() - begin < 0.2
    fork_server.close()


@pytest.mark.parametrize("is_up", [False, True])
def test_one_whose_supervisor_dies_before_it_is_awaited_clears_up(is_up: bool, scratch: Path) -> None:
    fork_server = ForkServer(fork_server_environment("cpu"))
    assert list(scratch.iterdir()) and (not is_up or select.select([fork_server._orders], [], [], 60)[0])
    fork_server._orders.close()
    assert fork_server._process.wait(60) == 0
    assert list(scratch.iterdir()) == []
    fork_server.close()


def test_ranks_compile_in_their_own_process_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    assert fork_server_environment("cpu")["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "4")
    assert fork_server_environment("cpu")["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
