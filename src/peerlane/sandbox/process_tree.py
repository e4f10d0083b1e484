"""Linux process plumbing: death signals, subreapers, and killing a whole tree."""

import contextlib
import os
import signal
import time
from collections import defaultdict

from peerlane.sandbox import linux

_KILL_S = 8.0


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends; at once if ``parent`` is already gone."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the new parent of all its descendants' orphans, so that none can slip away."""
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)


def _family() -> dict[int, list[int]]:
    """The living children of every process."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", errors="replace") as file:  # a process may call itself anything
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children[int(fields[1])].append(int(entry))
    return children


def children(root: int) -> set[int]:
    return set(_family()[root])


def descendants(root: int) -> list[int]:
    """All living descendants of a process, children before grandchildren."""
    family, found, queue = _family(), [], [root]
    while queue:
        for child in family.pop(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def kill_within_reach() -> None:
    """SIGKILL at one stroke for every process that this one may signal: none can start its successor meanwhile.

    Does nothing where that would reach further than a group, which is where the parent can be signalled: leaders have a parent outside.
    """
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def kill_user(uid: int) -> None:
    """SIGKILL at one stroke for every process of a user that is not root; for root.

    The process that does it acts as that user and is the next one, whom the first may not signal.
    """
    if (executioner := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid + 1, uid, uid + 1)  # gives up all capabilities
            kill_within_reach()
        finally:
            os._exit(0)
    os.waitpid(executioner, 0)


def kill_descendants() -> list[int]:
    """SIGKILL for every descendant of this process until none is left; returns those that survive for so long.

    The caller must adopt orphans, else a daemon whose parent died is not found.
    """
    end = time.monotonic() + _KILL_S
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
