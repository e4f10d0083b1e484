"""The nursery that comes up before the session that takes it; mostly with a stub in its place, which is up at once, or never."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate import early
from peerlane.evaluate.confine import Confinement
from peerlane.evaluate.early import early_nursery
from peerlane.evaluate.groups import Nursery, nursery_environment
from peerlane.evaluate.isolation import Isolation
from peerlane.evaluate.session import Session
from peerlane.settings import Deadlines


def stub(code: str) -> Isolation:
    """Runs this in place of the nursery; ``orders`` is its socket."""
    start = f"import socket, sys, time; orders = socket.socket(fileno=int(sys.argv[-2])); {code}"
    return Isolation("L0", Confinement(), {}, (sys.executable, "-c", start))


UP = stub("orders.send(b'ready'); orders.recv(1)")
COMING_UP = stub("time.sleep(600)")
BROKEN = stub("sys.exit('out of luck')")


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the folders of runs are made; none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [] and not early._waiting


def choose_always(monkeypatch: pytest.MonkeyPatch, isolation: Isolation) -> None:
    monkeypatch.setattr(early, "choose", lambda *_: isolation)


def session(isolation: Isolation, device: str = "cpu") -> Session:
    return Session(device, 1, Deadlines(), isolation=isolation)


@pytest.mark.parametrize("module", ["evaluate.groups", "evaluate.early", "cli.evaluation"])
def test_what_starts_a_nursery_does_not_import_torch(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys, peerlane.{module}; assert 'torch' not in sys.modules"], check=True)


def test_the_first_session_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_always(monkeypatch, UP)
    with early_nursery("cpu", None):
        pid = early._waiting[0].pid
        with session(UP) as first:
            assert first.nursery.pid == pid
        with session(UP) as second:
            assert second.nursery.pid != pid


def test_it_may_outlive_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_always(monkeypatch, UP)
    with early_nursery("cpu", None):
        taken = session(UP).__enter__()
    assert taken.nursery.alive
    taken.__exit__(None, None, None)


def test_another_isolation_or_environment_wants_another(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_always(monkeypatch, COMING_UP)
    with early_nursery("cpu", None):
        waiting = early._waiting[0]
        with session(UP) as other:
            assert other.nursery is not waiting
        assert early.take(nursery_environment("cuda"), COMING_UP) is None
        with monkeypatch.context() as changed:
            changed.setenv("NCCL_DEBUG", "INFO")
            assert early.take(nursery_environment("cpu"), COMING_UP) is None
        assert waiting.alive and waiting.serves(nursery_environment("cpu"), COMING_UP)
    assert not waiting.alive


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("isolation", [UP, COMING_UP, BROKEN])
def test_what_nobody_takes_is_ended_at_once(
    isolation: Isolation, ending: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_always(monkeypatch, isolation)
    begin = time.monotonic()
    waiting: list[Nursery] = []

    def run() -> None:
        with early_nursery("cpu", None):
            waiting.extend(early._waiting)
            if ending is not None:
                raise ending

    if ending is None:
        run()
    else:
        with pytest.raises(ending):
            run()
    assert not waiting[0].alive and time.monotonic() - begin < 4


def test_what_fails_early_is_left_to_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(*_: object) -> Isolation:
        raise UsageError("isolation L1 is not possible")

    monkeypatch.setattr(early, "choose", impossible)
    with early_nursery("cpu", "L1"):
        assert not early._waiting
    with early_nursery("cpu", "L2"):
        assert not early._waiting


@pytest.mark.parametrize("is_early", [True, False])
def test_one_that_does_not_come_up_is_told_by_the_session(is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_always(monkeypatch, BROKEN if is_early else UP)
    with early_nursery("cpu", None), pytest.raises(HarnessError, match="starts ranks did not come up: out of luck"), session(BROKEN):
        pass


def test_the_deadline_counts_from_the_start() -> None:
    nursery = Nursery({}, 0.3, UP)
    time.sleep(0.5)
    nursery.await_start()  # it has been up for long
    nursery.close()
    nursery = Nursery({}, 0.3, COMING_UP)
    time.sleep(0.3)
    begin = time.monotonic()
    with pytest.raises(HarnessError, match="did not come up"):
        nursery.await_start()
    assert time.monotonic() - begin < 0.2
    nursery.close()


@pytest.mark.parametrize("is_up", [False, True])
def test_one_whose_supervisor_dies_before_it_is_awaited_clears_up(is_up: bool, scratch: Path) -> None:
    nursery = Nursery(nursery_environment("cpu"))
    assert list(scratch.iterdir()) and (not is_up or select.select([nursery._orders], [], [], 60)[0])
    nursery._orders.close()
    assert nursery._process.wait(60) == 0
    assert list(scratch.iterdir()) == []
    nursery.close()
