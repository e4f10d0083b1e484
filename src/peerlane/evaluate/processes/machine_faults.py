"""Failures of the machine that say nothing about a candidate: too few cores for the programs that run, and GPUs that do not answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from peerlane.hardware.memory import gpu_memory

OVERLOADED = "overloaded"
"""The flag of a result whose deadline was missed on an overloaded machine: no final verdict."""
_SHARE = 0.7
_LOOK_S = 0.2


def cpu_share() -> float:
    """The share of one core that this thread gets when it asks for all of it."""
    begin, cpu = time.perf_counter(), time.thread_time()
    while (now := time.perf_counter()) - begin < _LOOK_S:
        pass
    return (time.thread_time() - cpu) / (now - begin)


def overloaded() -> bool:
    """True if more programs want cores than there are. Takes 0.2 s; the candidate's ranks must have ended."""
    return cpu_share() < _SHARE


def lost_gpus(indices: Sequence[int]) -> str | None:
    """Returns why these GPUs cannot be used, and what to do; None if they all answer, or there is no driver to ask."""
    found = [f"GPU {index} does not answer: {gpu.fault}" for index, gpu in zip(indices, gpu_memory(indices), strict=False) if gpu.fault]
    return f"{'; '.join(found)}. Leave it out with CUDA_VISIBLE_DEVICES, and tell the machine's administrator" if found else None
