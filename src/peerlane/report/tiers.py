"""Kinds of tasks: bound by latency or by bandwidth, and how much room the reference leaves.

A task whose roofline is below 20 us is mostly a contest of launches and round trips. Tiers of difficulty come from the committed results of
peerlane's own solutions: the less they gain, the harder it is to be faster than the reference.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from peerlane.hardware.profiles import H200_SXM, HardwareProfile
from peerlane.hardware.roofline import datasheet_peaks, roofline
from peerlane.problems import Problem
from peerlane.results.result import Result

LATENCY_US = 20.0
TIERS_FILE = Path(__file__).with_name("tiers.json")
"""made by ``tests/report/test_tables.py`` from TIERS_SOURCE, a path in the repository"""
TIERS_SOURCE = "results/h100x1/virtual_solutions.jsonl"
_WIDE, _TIGHT = 3.0, 1.5

Regime = Literal["latency", "bandwidth"]


def bound_us(problem: Problem, preset: str, world_size: int, profile: HardwareProfile = H200_SXM) -> float:
    """Returns the roofline of the preset's timed case, in microseconds; raises UsageError for a case that the problem lacks."""
    case = problem.cases(preset, world_size)[0]
    costs = [problem.cost(case, rank) for rank in range(world_size)]
    return float(roofline(costs, datasheet_peaks(profile)).bound_us)


def regime(bound: float) -> Regime:
    """Returns the kind of a task with this roofline."""
    return "latency" if bound < LATENCY_US else "bandwidth"


def tiers() -> dict[int, str]:
    """Returns the tier of every problem of the suite: ``easy``, ``medium`` or ``hard``."""
    return {int(number): tier for number, tier in json.loads(TIERS_FILE.read_text())["tiers"].items()}


def tiers_of(results: Iterable[Result]) -> Mapping[int, str]:
    """Returns the tier by problem: peerlane's solution gains a factor of 3 (easy), of 1.5 (medium), or less (hard)."""
    gains: dict[int, float] = {}
    for result in results:
        speedups = [found.median for mode in result.modes if (found := result.speedup(mode)) is not None]
        if result.correct and speedups:
            gains[result.problem.id] = max(speedups[-1], gains.get(result.problem.id, 0.0))
    return {number: "easy" if gain >= _WIDE else "medium" if gain >= _TIGHT else "hard" for number, gain in sorted(gains.items())}
