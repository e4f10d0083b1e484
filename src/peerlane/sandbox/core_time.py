"""Measures how long processes ran on a core, and how long they were ready to run while others had the cores."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreTime(NamedTuple):
    """Seconds since a mark. ``longest_``: of the thread with most."""

    run_s: float
    """The time on cores of all threads, and of child processes that have ended."""
    wait_s: float
    """in run queues, of all threads"""
    longest_run_s: float
    longest_wait_s: float


class CoreClock:
    """Reads the kernel's counts of processes, as differences to an earlier look."""

    def __init__(self) -> None:
        self._run_before: dict[int, float] = {}
        self._threads_before: dict[str, tuple[float, float]] = {}

    def mark(self, pids: Sequence[int]) -> None:
        """Begins the time that :meth:`since` reports. A process that is not among these is counted from its start."""
        self._run_before, self._threads_before = _run_s(pids), _threads(pids)

    def since(self, pids: Sequence[int]) -> CoreTime:
        """Returns what these processes had since the mark. All zero where the kernel does not tell."""
        run_s = sum(now - self._run_before.get(pid, 0.0) for pid, now in _run_s(pids).items())
        runs, waits = [0.0], [0.0]
        for name, (run, wait) in _threads(pids).items():
            before = self._threads_before.get(name, (0.0, 0.0))
            runs.append(run - before[0])
            waits.append(wait - before[1])
        return CoreTime(run_s, sum(waits), max(runs), max(waits))


def _run_s(pids: Sequence[int]) -> dict[int, float]:
    """Returns the CPU seconds of processes and of their children that have ended."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            found[pid] = sum(map(int, stat[11:15])) / _TICKS_PER_S
    return found


def _threads(pids: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Returns the seconds that threads ran and waited, by their folder in /proc."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                folder = f"/proc/{pid}/task/{thread}"
                with contextlib.suppress(OSError, ValueError):
                    run, wait, _ = Path(folder, "schedstat").read_text().split()
                    found[folder] = int(run) / 1e9, int(wait) / 1e9
    return found
