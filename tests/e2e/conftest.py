import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from e2e.faults import LentForkServer, Switchboard, switchboard
from e2e.runs import marked, marked_processes, wait_for
from kept_fork_servers import kept_fork_servers
from peerlane.evaluate import evaluator
from peerlane.evaluate.plan import Job
from peerlane.evaluate.processes.fork_client import ForkServer
from peerlane.sandbox.process_tree import descendants

__all__ = ["kept_fork_servers"]
MARKED = f"faults-{os.getpid()}"

# A shell that puts the tests in the background may have it ignored, as would then all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def lent() -> Iterator[ForkServer]:
    """The fork server of all the module's tests that ask for it: what it starts is up in milliseconds, and nothing of that may be left."""
    with marked(MARKED):
        fork_server = LentForkServer({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"})
        fork_server.await_start()  # here, not in a process that is forked from this one
    yield fork_server
    ForkServer.close(fork_server)
    assert marked_processes(MARKED) == []


@pytest.fixture
def fork_server(lent: ForkServer, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """In place of one for every session."""
    monkeypatch.setattr("peerlane.evaluate.processes.session.ForkServer", lambda *_: lent)
    return lent


@pytest.fixture
def board(fork_server: ForkServer) -> Iterator[Switchboard]:
    """Sees all messages of the test; no group outlives it."""
    with marked(MARKED), switchboard() as board:
        yield board
    wait_for(lambda: descendants(fork_server.pid) == [], 10, "the end of all groups")


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations look at the first case of a preset only."""
    make_jobs = evaluator.make_jobs

    def narrowed(job: Job) -> Job:
        presets = tuple(replace(preset, cases=preset.cases[:1]) for preset in job.problem.presets)
        return replace(job, problem=replace(job.problem, presets=presets))

    monkeypatch.setattr(evaluator, "make_jobs", lambda *given: [narrowed(job) for job in make_jobs(*given)])
