"""Whether other programs keep the machine so busy that a missed deadline says nothing about a candidate."""

from __future__ import annotations

import time

OVERLOADED = "overloaded"
"""The flag of a result whose deadline was missed on an overloaded machine: no final verdict."""
_SHARE = 0.7
_LOOK_S = 0.2


def cpu_share(seconds: float = _LOOK_S) -> float:
    """The share of one core that this thread gets when it asks for all of it."""
    begin, cpu = time.perf_counter(), time.thread_time()
    while (now := time.perf_counter()) - begin < seconds:
        pass
    return (time.thread_time() - cpu) / (now - begin)


def overloaded() -> bool:
    """True if more programs want cores than there are. Takes 0.2 s; the candidate's ranks must have ended."""
    return cpu_share() < _SHARE
