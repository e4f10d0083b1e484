"""Proof that other programs kept an evaluation from its cores, and no excuse for what a candidate does itself."""

import os
import time

import pytest

from peerlane.evaluate.processes.machine_faults import SLOWED, STARVED, cores, kept_from_cores_s
from peerlane.sandbox.core_time import CoreClock, CoreTime

TEN_S, TWO_CORES = 10.0, 2.0


def busy(threads: int, each_runs_s: float) -> CoreTime:
    """Threads that want a core all the time."""
    waits_s = TEN_S - each_runs_s
    return CoreTime(threads * each_runs_s, threads * waits_s, each_runs_s, waits_s)


@pytest.mark.parametrize(
    ("candidate", "least", "most"),
    [
        (busy(2, 10.0), 0.0, 0.0),
        (busy(4, 5.0), 0.0, 0.0),
        (busy(64, 20 / 64), 0.0, 0.0),
        (busy(64, 20 / 72), 0.0, SLOWED),
        (CoreTime(0.1, 0.3, 0.05, 0.15), 0.0, SLOWED),
        (busy(2, 5.0), 0.5, 0.5),
        (busy(4, 20 / 12), STARVED, 1.0),
    ],
    ids=["alone", "more_ranks_than_cores", "burns_cores", "burns_cores_beside_eight", "sleeps", "beside_two", "beside_eight"],
)
def test_only_what_others_took_is_an_excuse(candidate: CoreTime, least: float, most: float) -> None:
    idle = CoreTime(0.0, 0.0, 0.0, 0.0)
    assert least - 1e-9 <= kept_from_cores_s([candidate, idle], TEN_S, TWO_CORES) / TEN_S <= most + 1e-9


def test_trusted_ranks_that_a_candidate_keeps_waiting_are_none_either() -> None:
    burns, waits = busy(64, 20 / 65), CoreTime(20 / 65, 9.0, 20 / 65, 9.0)
    assert kept_from_cores_s([burns, waits], TEN_S, TWO_CORES) < SLOWED * TEN_S
    starved = CoreTime(1.0, 9.0, 1.0, 9.0)
    assert kept_from_cores_s([starved], TEN_S, TWO_CORES) == pytest.approx(9.0)


def test_the_clock_counts_from_its_mark() -> None:
    """Runs and waits are the kernel's own counts: this thread's run shows, whatever else the machine does."""

    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    clock = CoreClock()
    burn(0.1)
    clock.mark([os.getpid()])
    burn(0.3)
    found = clock.since([os.getpid(), 2**22 - 1])
    assert 0.25 <= found.longest_run_s < 0.39 and found.run_s >= 0.25 and found.wait_s >= found.longest_wait_s >= 0.0


def test_two_busy_processes_on_one_core_wait_for_each_other() -> None:
    core = min(os.sched_getaffinity(0))
    pids = []
    for _ in range(2):
        if (pid := os.fork()) == 0:
            os.sched_setaffinity(0, {core})
            while True:
                pass
        pids.append(pid)
    try:
        clock, begin = CoreClock(), time.monotonic()
        clock.mark(pids)
        while (found := clock.since(pids)).longest_wait_s < 0.3 and time.monotonic() - begin < 60:
            time.sleep(0.05)
        assert found.longest_wait_s >= 0.3 and found.wait_s >= found.longest_wait_s
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_there_is_a_core() -> None:
    assert 0 < cores() <= len(os.sched_getaffinity(0))
