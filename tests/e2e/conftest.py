from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from e2e.faults import LentNursery, Switchboard, switchboard
from e2e.runs import marked, marked_processes, wait_for
from peerlane.evaluate import evaluation
from peerlane.evaluate.examine import Job
from peerlane.evaluate.nursery_handle import Nursery
from peerlane.evaluate.processes import descendants

MARKED = f"faults-{os.getpid()}"

# A shell that puts the tests in the background may have it ignored, as would then all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def lent() -> Iterator[Nursery]:
    """The nursery of all the module's tests that ask for it: what it bears starts in milliseconds, and nothing of that may be left."""
    with marked(MARKED):
        nursery = LentNursery({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"})
        nursery.await_start()  # here, not in a process that is forked from this one
    yield nursery
    Nursery.close(nursery)
    assert marked_processes(MARKED) == []


@pytest.fixture
def nursery(lent: Nursery, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """In place of one for every session."""
    monkeypatch.setattr("peerlane.evaluate.session.Nursery", lambda *_: lent)
    return lent


@pytest.fixture
def board(nursery: Nursery) -> Iterator[Switchboard]:
    """Sees all messages of the test; no group outlives it."""
    with marked(MARKED), switchboard() as board:
        yield board
    wait_for(lambda: descendants(nursery.pid) == [], 10, "the end of all groups")


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations look at the first case of a preset only."""
    make_jobs = evaluation.make_jobs

    def narrowed(job: Job) -> Job:
        presets = tuple(replace(preset, cases=preset.cases[:1]) for preset in job.problem.presets)
        return replace(job, problem=replace(job.problem, presets=presets))

    monkeypatch.setattr(evaluation, "make_jobs", lambda plan: [narrowed(job) for job in make_jobs(plan)])
