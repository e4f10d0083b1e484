"""What has been measured of every problem: reference times, margins and counts, from the files in ``results``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peerlane.evaluate.results.reader import read_results
from peerlane.evaluate.results.result import Result
from peerlane.selftest.calibrate import Calibration, CountedStep, read_calibrations

RESULTS = Path("results")
NODE = RESULTS / "h200x4"
NODE_NAME = "4x H200"
REFERENCES = NODE / "references.jsonl"
PRODUCTION, PUBLIC = NODE / "production.jsonl", NODE / "public_references.json"
TWO_GPUS = RESULTS / "h200x2"
ONE_GPU = RESULTS / "h100x1"
CALIBRATIONS = (RESULTS / "cpu" / "calibration.jsonl", TWO_GPUS / "calibration.jsonl")
PRODUCTION_OF_TWO = TWO_GPUS / "production.jsonl"
MECHANISMS = NODE / "mechanisms.json"
COUNTED_WORLD_SIZE = 4


@dataclass(frozen=True)
class PublicTimes:
    """Eager calls back to back, on unchanged inputs: microseconds per call, on average and at least."""

    mean_us: float
    min_us: float


@dataclass(frozen=True)
class Evidence:
    """Recorded results of the references, by problem number.

    Attributes:
        references: evaluations of the reference as its own candidate, one for every preset and world size.
        counts: what the reference does in one call of the timed ``pkb`` case on rank 0 of four; see
        :mod:`peerlane.problems.contract.count`.
        public: what the public benchmark's reference of the same number takes on the same class of node.
    """

    references: Mapping[int, Sequence[Result]] = field(default_factory=dict)
    counts: Mapping[int, Sequence[CountedStep]] = field(default_factory=dict)
    public: Mapping[int, PublicTimes] = field(default_factory=dict)


def read_evidence(root: Path) -> Evidence:
    """The evidence below a checkout; what is not there has not been measured."""
    references: dict[int, dict[tuple[str, int], Result]] = {}
    for name in (REFERENCES, PRODUCTION, PRODUCTION_OF_TWO):
        for result in _results(root / name):
            if result.candidate.backend == "reference" and result.correct:
                references.setdefault(result.problem.id, {})[result.preset, result.world_size] = result
    counts: dict[int, Sequence[CountedStep]] = {}
    for item in all_calibrations(root):
        if item.preset == "pkb" and item.world_size == COUNTED_WORLD_SIZE and item.variant == "default" and item.steps:
            counts.setdefault(item.problem, item.steps)
    return Evidence(
        {number: list(results.values()) for number, results in references.items()},
        counts,
        _public_times(root / PUBLIC),
    )


def _public_times(path: Path) -> dict[int, PublicTimes]:
    if not path.is_file():
        return {}
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return {int(number): PublicTimes(mean_us, recorded["min_us"][number]) for number, mean_us in recorded["mean_us"].items()}


def _results(path: Path) -> list[Result]:
    return read_results(path) if path.is_file() else []


def all_calibrations(root: Path) -> list[Calibration]:
    """The calibrations of all devices."""
    return [item for path in CALIBRATIONS for item in read_calibrations(root / path)]
