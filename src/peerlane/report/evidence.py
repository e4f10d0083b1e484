"""Measurements of every problem that come with the package: reference times, times of our solutions, and counts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from peerlane.problems.contract.count import Step
from peerlane.results.record import Record

FILE = Path(__file__).with_name("measured.jsonl")
"""What pages show of the committed results. It comes with the package, so that ``peerlane show`` needs no checkout."""


class ReferenceTime(Record):
    """The reference of one problem in one preset, world size and launch mode."""

    preset: str
    world_size: int
    mode: str
    reference_us: float
    """median"""
    bound_us: float
    bound_by: str
    utilisation: float


class SolutionTime(Record):
    """The solution that comes with peerlane beside the reference, in one preset, world size and launch mode on one machine."""

    machine: str
    """GPUs and class: ``2x H100``, ``1x H200, virtual node``"""
    virtual: bool = False
    """ranks share a GPU"""
    preset: str
    world_size: int
    mode: str
    reference_us: float
    solution_us: float
    speedup: float
    certain: bool
    """the speedup is above measurement noise, or the solution is certainly slower"""
    utilisation: float | None = None
    """the time at the datasheet's bound over the solution's time, on a node"""


class PublicTimes(Record):
    """Eager calls back to back, on unchanged inputs: microseconds per call, on average and at least."""

    mean_us: float
    min_us: float


class Measured(Record):
    """The evidence about one problem.

    Attributes:
        times: of the reference, evaluated as its own candidate, in order of their files.
        steps: what the reference does in one call of the timed ``pkb`` case on rank 0 of four; see
            :mod:`peerlane.problems.contract.count`.
        public: what the public benchmark's reference of the same number takes on the same class of node.
        solutions: times of the solution that comes with peerlane, nodes first.
    """

    times: tuple[ReferenceTime, ...] = ()
    steps: tuple[Step, ...] = ()
    public: PublicTimes | None = None
    solutions: tuple[SolutionTime, ...] = ()

    def reference_us(self, preset: str) -> dict[str, float]:
        """Returns the newest time of the reference per launch mode."""
        return {time.mode: time.reference_us for time in self.times if time.preset == preset}


NOTHING = Measured()
Evidence: TypeAlias = Mapping[int, Measured]
"""Measurements by problem number. A problem without one has not been measured."""


def packaged_evidence() -> Evidence:
    rows = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return {row["problem"]: Measured.model_validate(row["measured"]) for row in rows}
