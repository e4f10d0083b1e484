"""The CPU cores on which ranks' calling threads are timed. A thread that the scheduler moves about calls more slowly for seconds."""

import os

_MOST = 8  # cores of a rank
_get_affinity, _set_affinity = os.sched_getaffinity, os.sched_setaffinity


def cores_of_rank(rank: int, world_size: int) -> list[int]:
    """The cores of a rank: the same in every group, and no other rank's; half of the machine's at most. Empty on small machines."""
    cores = physical_cores(os.sched_getaffinity(0))[1:]
    share = len(cores) // world_size
    mine = cores[rank * share : (rank + 1) * share]
    return mine[: min(_MOST, max(1, share // 2))]


def cores_beside(world_size: int) -> set[int]:
    """The cores on which no rank of such a group is timed, for builders; all cores of a machine that has no others."""
    allowed = os.sched_getaffinity(0)
    timed = {_siblings(cpu) for rank in range(world_size) for cpu in cores_of_rank(rank, world_size)}
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


class Pin:
    """Keeps the calling thread on one core of ``cores`` while a block is timed. Without cores it does nothing."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores
        self._everywhere = _get_affinity(0)

    def take(self, number: int) -> None:
        """Pins the calling thread. The same number gives the ranks of both groups the same core."""
        if self._cores:
            _set_affinity(0, {self._cores[number % len(self._cores)]})

    def release(self) -> None:
        if self._cores:
            _set_affinity(0, self._everywhere)
