"""Linux process plumbing: death signals, subreapers, and killing a whole tree."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict

from peerlane.evaluate import linux


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends; at once if ``parent`` is already gone."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the new parent of all its descendants' orphans, so that none can slip away."""
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)


def core_of_rank(rank: int, world_size: int) -> set[int] | None:
    """The core on which a rank's calling thread is timed: the same for this rank in every group, and no other rank's.

    A thread that the scheduler moves about calls up to twice as slowly for seconds at a time. Only one group is busy at a time, so all
    groups can use the same cores. None where there are not more cores than ranks.
    """
    cores = physical_cores(os.sched_getaffinity(0))
    return {cores[1 + rank * (len(cores) - 1) // world_size]} if len(cores) > world_size else None


def cores_beside(world_size: int) -> set[int]:
    """The cores on which no rank of such a group is timed, for what runs meanwhile; all of them where there is none to spare."""
    allowed = os.sched_getaffinity(0)
    timed = {_siblings(cpu) for rank in range(world_size) for cpu in core_of_rank(rank, world_size) or ()}
    return {cpu for cpu in allowed if _siblings(cpu) not in timed} or allowed


def physical_cores(allowed: set[int]) -> list[int]:
    """One CPU number per physical core among these, ascending."""
    cores: dict[str, int] = {}
    for cpu in sorted(allowed):
        cores.setdefault(_siblings(cpu), cpu)
    return sorted(cores.values())


def _siblings(cpu: int) -> str:
    """The CPUs of the physical core that this one belongs to, as the kernel lists them."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read().strip()
    except OSError:
        return str(cpu)


def _family() -> dict[int, list[int]]:
    """The living children of every process."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children[int(fields[1])].append(int(entry))
    return children


def children(root: int) -> set[int]:
    """The living children of a process."""
    return set(_family()[root])


def descendants(root: int) -> list[int]:
    """All living descendants of a process, children before grandchildren."""
    family, found, queue = _family(), [], [root]
    while queue:
        for child in family.pop(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def kill_descendants(deadline_s: float = 8.0) -> list[int]:
    """SIGKILL for every descendant of this process until none is left; returns those that survived the deadline.

    The caller must adopt orphans, else a daemon whose parent died is not found.
    """
    end = time.monotonic() + deadline_s
    while True:
        alive = descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.01)
