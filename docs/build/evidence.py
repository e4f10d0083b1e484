"""Evidence about every problem, read from the results below a checkout; the package takes a copy of it along."""

import json
from collections.abc import Iterator
from pathlib import Path

from peerlane.evaluate.selftest.calibrate import read_calibrations
from peerlane.problems.contract.count import Step
from peerlane.report.evidence import Evidence, Measured, PublicTimes, ReferenceTime, SolutionTime
from peerlane.report.tables import shown_speedup
from peerlane.results.reader import last_right, read_results
from peerlane.results.result import Result

PACKAGED = Path("src/peerlane/report/measured.jsonl")
RESULTS = Path("results")
NODE = RESULTS / "h200x4"
NODE_NAME = "4x H200"
REFERENCES = NODE / "references.jsonl"
PRODUCTION, PUBLIC = NODE / "production.jsonl", NODE / "public_references.json"
TWO_GPUS = RESULTS / "h200x2"
ONE_GPU = RESULTS / "h100x1"
CALIBRATIONS = (RESULTS / "cpu" / "calibration.jsonl", TWO_GPUS / "calibration.jsonl")
PRODUCTION_OF_TWO = TWO_GPUS / "production.jsonl"
SOLUTIONS = (
    *(RESULTS / "h100x2" / f"{name}.jsonl" for name in ("solutions", "production", "bandwidth")),
    *(RESULTS / "h100x1" / f"{name}.jsonl" for name in ("virtual_production", "virtual_bandwidth")),
    *(RESULTS / "h200x1" / f"{name}.jsonl" for name in ("virtual_solutions", "virtual_bandwidth")),
)
"""the newest runs of our solutions on each class of machine"""
MECHANISMS = NODE / "mechanisms.json"
COUNTED_WORLD_SIZE = 4


def packaged(evidence: Evidence) -> dict[Path, str]:
    """Returns path -> text of the file that the package takes along: one line of JSON for each problem."""
    rows = ({"problem": number, "measured": measured.model_dump(exclude_defaults=True)} for number, measured in sorted(evidence.items()))
    return {PACKAGED: "".join(f"{json.dumps(row)}\n" for row in rows)}


def read_evidence(root: Path) -> Evidence:
    """Reads the evidence from the results below a checkout."""
    results: dict[int, dict[tuple[str, int], Result]] = {}
    for name in (REFERENCES, PRODUCTION, PRODUCTION_OF_TWO):
        for result in _results(root / name):
            if result.candidate.backend == "reference" and result.correct:
                results.setdefault(result.problem.id, {})[result.preset, result.world_size] = result
    steps: dict[int, tuple[Step, ...]] = {}
    for item in (item for path in CALIBRATIONS for item in read_calibrations(root / path)):
        if item.preset == "pkb" and item.world_size == COUNTED_WORLD_SIZE and item.variant == "default" and item.steps:
            steps.setdefault(item.problem, item.steps)
    public = _public_times(root / PUBLIC)
    solutions: dict[int, list[SolutionTime]] = {}
    for result in last_right(item for name in SOLUTIONS for item in _results(root / name)):
        if result.correct and (result.candidate.path or "").rpartition("/")[2].startswith(f"p{result.problem.id:03d}_"):
            solutions.setdefault(result.problem.id, []).extend(_solution_times(result))
    return {
        number: Measured(
            times=tuple(time for result in results.get(number, {}).values() for time in reference_times(result)),
            steps=steps.get(number, ()),
            public=public.get(number),
            solutions=tuple(solutions.get(number, ())),
        )
        for number in results.keys() | steps.keys() | public.keys() | solutions.keys()
    }


def reference_times(result: Result) -> Iterator[ReferenceTime]:
    """Returns the times of a reference that was its own candidate: one for every launch mode that was timed."""
    for speed in result.speeds:
        bound = next((item for item in speed.utilisation if item.ceilings == "measured"), *speed.utilisation[:1])
        yield ReferenceTime(
            preset=result.preset,
            world_size=result.world_size,
            mode=speed.mode,
            reference_us=speed.reference_us.median,
            bound_us=bound.bound_us,
            bound_by=bound.bound_by,
            utilisation=bound.reference,
        )


def _solution_times(result: Result) -> Iterator[SolutionTime]:
    node = result.node
    gpu = (node.gpu or "unknown GPU").removeprefix("NVIDIA ").split()[0]
    for speed in result.speeds:
        bound = None if node.place.shares_gpus else next((item for item in speed.utilisation if item.ceilings == "datasheet"), None)
        yield SolutionTime(
            machine=f"{node.gpus}x {gpu}{', virtual node' if node.place.shares_gpus else ''}",
            virtual=node.place.shares_gpus,
            preset=result.preset,
            world_size=result.world_size,
            mode=speed.mode,
            reference_us=speed.reference_us.median,
            solution_us=speed.candidate_us.median,
            speedup=shown_speedup(speed),
            certain=speed.faster or speed.speedup.high < 1,
            utilisation=None if bound is None else bound.candidate,
        )


def _public_times(path: Path) -> dict[int, PublicTimes]:
    if not path.is_file():
        return {}
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return {int(number): PublicTimes(mean_us=mean_us, min_us=recorded["min_us"][number]) for number, mean_us in recorded["mean_us"].items()}


def _results(path: Path) -> list[Result]:
    return read_results(path) if path.is_file() else []
