"""What has been measured of every problem: reference times, margins and counts, from the files in ``results``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peerlane.evaluate.calibrate import Calibration, CountedStep, read_calibrations
from peerlane.evaluate.verdict import Result
from peerlane.report.records import read_results

RESULTS = Path("results")
NODE = RESULTS / "h200x4"
NODE_NAME = "4x H200"
NOISE, PRODUCTION, PUBLIC = NODE / "noise.jsonl", NODE / "production.jsonl", NODE / "public_references.json"
CALIBRATIONS = (RESULTS / "cpu" / "calibration.jsonl", NODE / "calibration.jsonl")
COUNTED_WORLD_SIZE = 4


@dataclass(frozen=True)
class Evidence:
    """Recorded results of the references, by problem number.

    Attributes:
        references: evaluations of the reference as its own candidate, at any preset, oldest first.
        counts: what the reference does in one call of the timed ``pkb`` case on rank 0 of four; see :mod:`peerlane.problems._count`.
        public_us: what the public benchmark's reference of the same number takes, eager, on the same class of node.
    """

    references: Mapping[int, Sequence[Result]] = field(default_factory=dict)
    counts: Mapping[int, Sequence[CountedStep]] = field(default_factory=dict)
    public_us: Mapping[int, float] = field(default_factory=dict)


def read_evidence(root: Path) -> Evidence:
    """The evidence below a checkout; what is not there has not been measured."""
    references: dict[int, list[Result]] = {}
    for name in (NOISE, PRODUCTION):
        for result in read_results(root / name) if (root / name).is_file() else ():
            if result.candidate.backend == "reference" and result.correct:
                references.setdefault(result.problem.id, []).append(result)
    counts: dict[int, Sequence[CountedStep]] = {}
    for item in all_calibrations(root):
        if item.preset == "pkb" and item.world_size == COUNTED_WORLD_SIZE and item.variant == "default" and item.steps:
            counts.setdefault(item.problem, item.steps)
    public = json.loads((root / PUBLIC).read_text(encoding="utf-8"))["mean_us"] if (root / PUBLIC).is_file() else {}
    return Evidence(references, counts, {int(number): float(value) for number, value in public.items()})


def all_calibrations(root: Path) -> list[Calibration]:
    """The calibrations of all devices."""
    return [item for path in CALIBRATIONS for item in read_calibrations(root / path)]
