"""Watches for processes without progress. In a deadlock they only wait; in an endless loop they only use a core."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from peerlane.sandbox.holdings import fields
from peerlane.sandbox.limits import LOOK_S

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_EVENTS, _EVENTS_PER_S = 8, 4
"""So many events of a process say nothing: libraries look after their connections now and then."""


class _Work(NamedTuple):
    """Counts that the kernel keeps of a process."""

    runs: bool
    events: int
    """page faults, reads, writes, and waits of the main thread that ended"""
    cpu_s: float
    threads: int


_EXITING, _DUMPS_CORE, _SIGNALED = 0x4, 0x200, 0x400  # PF_ flags of linux/sched.h
_SIGKILL = 1 << signal.SIGKILL - 1


def is_ending(pid: int) -> bool:
    """Tells whether the kernel has begun to end a process. That may take long, where a driver waits for the device."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        state, *numbers = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if state in "ZX" or int(numbers[5]) & (_EXITING | _DUMPS_CORE | _SIGNALED):
            return True
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) & _SIGKILL:
                return True
    return False


class Stillness:
    """Watches processes, and counts the seconds in which none of them had page faults, read, wrote, came out of a wait, or started another.

    Seconds count only as far as they had cores: a process that others keep from running is not stuck.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: dict[int, _Work] = {}
        self._mark: dict[int, _Work] = {}
        self._looked = 0.0
        self._told = 0

    def look(self, pids: Sequence[int]) -> int | None:
        """Returns the whole seconds of standing still, if they have changed; looks every ``LOOK_S`` at most."""
        if (now := time.monotonic()) < self._looked + LOOK_S:
            return None
        passed, self._looked = now - self._looked, now
        work = {pid: found for pid in pids if (found := _work(pid)) is not None}
        if len(work) < len(pids) or self._any_progress(work):
            self.seconds, self._mark = 0.0, work
        else:
            cpu_s = max((found.cpu_s - self._before[pid].cpu_s for pid, found in work.items()), default=0.0)
            self.seconds += min(passed, cpu_s) if any(found.runs for found in work.values()) else passed
        self._before = work
        if (told := int(self.seconds)) == self._told:
            return None
        self._told = told
        return told

    def _any_progress(self, work: dict[int, _Work]) -> bool:
        if work.keys() != self._mark.keys():
            return True
        most = _EVENTS + _EVENTS_PER_S * self.seconds
        return any(found.threads != self._mark[pid].threads or found.events - self._mark[pid].events > most for pid, found in work.items())


def _work(pid: int) -> _Work | None:
    """Returns what a process has done; None if the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        waits = fields(f"/proc/{pid}/status", "voluntary_ctxt_switches")["voluntary_ctxt_switches"]
        calls = fields(f"/proc/{pid}/io", "syscr", "syscw")
        events = int(stat[7]) + int(stat[9]) + waits + sum(calls.values())
        return _Work(stat[0] in "RD", events, (int(stat[11]) + int(stat[12])) / _TICKS_PER_S, int(stat[17]))
    return None
