"""Failures of the machine that say nothing about a candidate: cores that other programs take, and GPUs that do not answer."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from peerlane.hardware.topology import gpu_memory
from peerlane.sandbox.core_time import CoreTime

SLOWED, STARVED = 0.1, 0.25
"""Shares of its time for which others kept an evaluation from the cores: it is judged once more; what is late again has no verdict."""


def cores() -> float:
    """Returns how many cores this process and its children may use at a time: those that it may run on, or the quota of its container."""
    found = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # "max", or control groups of the first version
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found, int(quota) / int(period))
    return found


def kept_from_cores_s(groups: Sequence[CoreTime], seconds: float, available: float) -> float:
    """Returns for how long other programs kept an evaluation from its cores.

    The groups of ranks work in turns, so the longest waits of their threads add up. Of all waits in run queues, others are to blame for as
    much as they could take: the time of ``available`` cores in so many ``seconds`` without what these groups used themselves.
    """
    waited_s = sum(group.wait_s for group in groups)
    taken_s = max(0.0, available * seconds - sum(group.run_s for group in groups))
    blame = min(1.0, taken_s / waited_s) if waited_s else 0.0
    return blame * sum(group.longest_wait_s for group in groups)


def lost_gpus(indices: Sequence[int]) -> str | None:
    """Returns why these GPUs cannot be used, and what to do; None if they all answer, or there is no driver to ask."""
    found = [f"GPU {index} does not answer: {gpu.fault}" for index, gpu in zip(indices, gpu_memory(indices), strict=False) if gpu.fault]
    return f"{'; '.join(found)}. Leave it out with CUDA_VISIBLE_DEVICES, and tell the machine's administrator" if found else None
