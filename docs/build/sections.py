"""Sections of documents that show committed results: what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.build.comparison import MODES, comparison_report, summary
from docs.build.corpus import rule_table, rules_table, selftest_report
from docs.build.evidence import (
    CALIBRATIONS,
    MECHANISMS,
    NODE,
    ONE_GPU,
    PRODUCTION_OF_TWO,
    REFERENCES,
    RESULTS,
    TWO_GPUS,
    read_evidence,
)
from docs.build.extensions import calls_table
from docs.build.figures import headroom_table
from docs.build.findings import launch_modes_table, rungs_table
from docs.build.kernels import (
    LAYERS,
    ON_ONE_GPU,
    backend_table,
    batch_invariance_table,
    collectives_table,
    fused_table,
    layers_table,
    product_table,
    serving_table,
    training_table,
    ways_table,
)
from docs.build.operators import operators_table
from docs.build.production import production_section, public_protocol_section
from docs.build.published import PUBLISHED
from docs.build.sentences import below_half, headline
from docs.build.tables import Row, table
from peerlane import problems
from peerlane.errors import UsageError
from peerlane.evaluate.selftest import outcome
from peerlane.evaluate.selftest.calibrate import read_calibrations
from peerlane.evaluate.selftest.run import attributed
from peerlane.evaluate.selftest.table import FILE, load
from peerlane.report.mechanisms import mechanisms_report, read_mechanisms
from peerlane.report.noise import ACCEPTANCE, Acceptance, Reached, accuracy, reached
from peerlane.report.plots import sweep_bytes
from peerlane.report.selftest import calibration_table
from peerlane.report.tables import environment_lines, microseconds
from peerlane.results.reader import read_results
from peerlane.results.record import Mode
from peerlane.results.result import Result


def _speeds(path: Path) -> str:
    return comparison_report(read_results(path))


def _solutions(path: Path) -> str:
    """Returns the table of speeds below a line for each launch mode that sums it up."""
    results = read_results(path)
    libraries = path.with_name("libraries.jsonl")
    return "\n".join([*summary(results), "", comparison_report(results, read_results(libraries) if libraries.is_file() else [])])


def _accuracy(path: Path) -> str:
    return accuracy(read_results(path))


_REPEATED = {
    "first": "h100x1/references.jsonl",
    "second": "h100x1/references_again.jsonl",
    "third": "h100x1/references_third.jsonl",
    "virtual node": "h100x1/virtual_references.jsonl",
    "two H200": "h200x2/references_present.jsonl",
    "two H200, links awake": "h200x2/protocol2_references.jsonl",
}
"""Runs of the references as their own candidates, and their files."""


def _acceptance(first: Path) -> str:
    """Returns the table of the runs, the first one among them, and where they were measured."""
    runs = {name: read_results(first.parents[1] / file) for name, file in _REPEATED.items()}
    nodes = {line: None for results in runs.values() for line in environment_lines(results)}
    return acceptance_table(runs) + "\n" + "\n\n".join(nodes)


def acceptance_table(runs: Mapping[str, Sequence[Result]]) -> str:
    """Returns a line per run and launch mode: what was promised, what was measured, and whether that is enough."""
    rows = [
        (run, mode, promised, found)
        for run, results in runs.items()
        for mode, promised in ACCEPTANCE.items()
        if (found := reached(results, mode)) is not None
    ]
    columns: Mapping[str, Callable[[tuple[str, Mode, Acceptance, Reached]], str]] = {
        "run": lambda row: row[0],
        "mode": lambda row: row[1],
        "problems": lambda row: str(row[3].problems),
        "near 1": lambda row: f"{row[3].within / row[3].problems:.0%} within {row[2].most:.0%}",
        "promised near 1": lambda row: f"{row[2].share:.0%}",
        "largest deviation": lambda row: f"{row[3].largest:.1%}",
        "promised at most": lambda row: f"{row[2].every:.0%}",
        "met": lambda row: "yes" if row[3].met else "no",
        "called faster": lambda row: str(row[3].faster),
    }
    return table(rows, columns, words=("run", "mode", "met"))


def _sweep(path: Path) -> str:
    """Returns for each launch mode a table with a line for each size: microseconds of a problem's first candidate and of the reference."""
    results = read_results(path)
    parts = []
    for mode in MODES:
        sizes: dict[int, Row] = {}
        first = {result.problem.id: result.candidate.name for result in reversed(results)}
        for result in results:
            if (size := sweep_bytes(result.preset)) is not None and result.candidate.name == first[result.problem.id]:
                speed = result.speed_in(mode)
                times = "-" if speed is None else f"{microseconds(speed.candidate_us)} / {microseconds(speed.reference_us)}"
                sizes.setdefault(size, {"bytes": size})[result.problem.slug] = times
        slugs = {result.problem.id: result.problem.slug for result in results}
        columns = {"size": "bytes", **{slugs[number]: slugs[number] for number in sorted(slugs)}}
        parts.append(f"{mode.capitalize()} mode:\n\n{table([sizes[size] for size in sorted(sizes)], columns)}")
    return "\n".join([*parts, *environment_lines(results)])


def _margins(path: Path) -> str:
    return calibration_table(read_calibrations(path)).markdown()


def _coverage(_: Path) -> str:
    """Returns how many problems there are of each kind of parallelism, and which; a problem counts once for every tag that it has."""
    suite = problems.suite()
    kinds = Counter(tag for item in suite for tag in item.parallelism)
    columns: Mapping[str, Any] = {
        "parallelism": lambda kind: kind.replace("_", " "),
        "count": lambda kind: str(kinds[kind]),
        "problems": lambda kind: ", ".join(str(item.id) for item in suite if kind in item.parallelism),
    }
    return table([kind for kind, _ in kinds.most_common()], columns, words=("parallelism", "problems"))


def _selftest(path: Path) -> str:
    outcomes = outcome.read_outcomes(path)
    corpus = load()
    return selftest_report(corpus, attributed(corpus, outcomes)) if outcomes else "No run is recorded here.\n"


def _mechanisms(path: Path) -> str:
    return mechanisms_report(read_mechanisms(path)) if path.is_file() else "No measurement is recorded here.\n"


CORPUS = Path("tests/adversarial") / FILE
RULES = ("inputs", "outputs", "end_of_call", "clocks", "processes", "state", "types", "precision", "races", "memory", "tracks", "isolation")
"""The rules of the corpus; each has a page."""

_ON_H100 = ("gather", "all_reduce")
"""Parts of ``bench_layers.py`` whose newest run was on two H100."""

SECTIONS: dict[str, tuple[Path, Callable[[Path], str]]] = {
    "accuracy": (ONE_GPU / "references.jsonl", _acceptance),
    "references": (REFERENCES, _accuracy),
    "references_of_two": (TWO_GPUS / "references.jsonl", _accuracy),
    "production_of_two": (PRODUCTION_OF_TWO, _accuracy),
    "sweep_of_two": (TWO_GPUS / "sweep.jsonl", _sweep),
    "fused_production_of_two": (TWO_GPUS / "fused_production.jsonl", _speeds),
    "solutions_of_two_h100": (RESULTS / "h100x2" / "solutions.jsonl", _solutions),
    "sweep_of_two_h100": (RESULTS / "h100x2" / "sweep.jsonl", _speeds),
    "production_of_two_h100": (RESULTS / "h100x2" / "production.jsonl", production_section),
    "production_of_two_h200": (TWO_GPUS / "production_solutions.jsonl", production_section),
    "public_protocol_of_two_h200": (TWO_GPUS / "kittens.jsonl", public_protocol_section),
    "production_virtual_h200": (RESULTS / "h200x1" / "virtual_production.jsonl", production_section),
    "bandwidth_virtual_h200": (RESULTS / "h200x1" / "virtual_bandwidth.jsonl", production_section),
    "fused_of_two_h100": (RESULTS / "h100x2" / "fused.json", fused_table),
    "backend_of_two_h100": (RESULTS / "h100x2" / "backend.json", partial(backend_table, mode="graph")),
    "backend_of_two_h200": (TWO_GPUS / "backend.json", partial(backend_table, mode="graph")),
    "backend_eager_of_two_h200": (TWO_GPUS / "backend.json", partial(backend_table, mode="eager")),
    "backend_async_of_two_h200": (TWO_GPUS / "backend.json", partial(backend_table, mode="asynchronous")),
    "all_reduce_ways_of_two_h200": (TWO_GPUS / "all_reduce_ways.json", ways_table),
    "serving": (TWO_GPUS / "serving.jsonl", serving_table),
    **{f"layers_{part}_of_two_h100": (RESULTS / "h100x2" / "layers.jsonl", layers_table(part)) for part in _ON_H100},
    **{f"layers_{part}_of_two_h200": (TWO_GPUS / "layers.jsonl", layers_table(part)) for part in LAYERS if part not in _ON_H100},
    **{f"{name}_of_one": (RESULTS / file, show) for name, (file, show) in ON_ONE_GPU.items()},
    "training_of_two_h200": (TWO_GPUS / "training.jsonl", training_table),
    "batch_invariance": (TWO_GPUS / "batch_invariance.jsonl", batch_invariance_table),
    "backend_virtual": (ONE_GPU / "backend.json", partial(backend_table, mode="graph")),
    "solutions_virtual": (ONE_GPU / "virtual_solutions.jsonl", _solutions),
    "headline": (TWO_GPUS / "production_solutions.jsonl", headline),
    "below_half": (TWO_GPUS / "production_solutions.jsonl", below_half),
    "below_half_pkb": (RESULTS / "h100x2" / "solutions.jsonl", below_half),
    "launch_modes": (REFERENCES, lambda path: launch_modes_table(path.parents[1])),
    "races_by_rung": (TWO_GPUS / outcome.FILE, lambda path: rungs_table(path.parents[1])),
    "cuda_calls": (Path("src/peerlane/emulator/cuda_host"), calls_table),
    "coverage": (Path("src/peerlane/problems/__init__.py"), _coverage),
    "headroom": (REFERENCES, lambda path: headroom_table(read_evidence(path.parents[2]))),
    "operators": (Path("docs/build/operators.py"), lambda _: operators_table()),
    "mechanisms": (MECHANISMS, _mechanisms),
    "collectives": (NODE / "collectives.json", collectives_table),
    "fused": (NODE / "fused.json", fused_table),
    "fused_of_two": (TWO_GPUS / "fused.json", fused_table),
    "product_of_two": (TWO_GPUS / "product.json", product_table),
    "margins_cpu": (CALIBRATIONS[0], _margins),
    "margins_gpu": (CALIBRATIONS[1], _margins),
    "corpus_rules": (CORPUS, rules_table),
    **{f"corpus_{rule}": (CORPUS, partial(rule_table, rule=rule)) for rule in RULES},
    "selftest_cpu": (RESULTS / "cpu" / outcome.FILE, _selftest),
    "selftest_gpu": (ONE_GPU / outcome.FILE, _selftest),
    **{f"published_{name}": (RESULTS / "published" / "verdicts.jsonl", show) for name, show in PUBLISHED.items()},
}
"""Name of a section -> the file of results it shows, relative to the checkout, and how."""

DOCUMENTS = (
    Path("README.md"),
    Path("docs/compare.md"),
    Path("docs/measurements.md"),
    *(
        Path(f"docs/measurements/{name}.md")
        for name in ("by-size", "collectives", "earlier", "exactness", "kernels", "layers", "production", "products", "virtual-node")
    ),
    Path("docs/science.md"),
    Path("docs/published-kernels.md"),
    Path("docs/suite.md"),
    Path("docs/calibration.md"),
    Path("docs/batch-invariance.md"),
    Path("docs/serving.md"),
    Path("docs/ops-support.md"),
    Path("docs/tutorials/train.md"),
    Path("docs/device/emulator.md"),
    Path("docs/device/principles.md"),
    Path("docs/integrity/README.md"),
    Path("docs/integrity/outcomes.md"),
    *(Path(f"docs/integrity/{rule}.md") for rule in RULES),
)


def filled(text: str, root: Path) -> str:
    """Makes every known section of the document anew; raises UsageError for one without an end."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        source, show = SECTIONS[name]
        return f"<!-- {name}:begin -->\n{show(root / source)}\n<!-- {name}:end -->"

    names = re.findall(r"<!-- (\w+):begin -->", text)
    for name in names:
        if name in SECTIONS and f"<!-- {name}:end -->" not in text:
            raise UsageError(f"the section {name} has no end: expected <!-- {name}:end -->")
    known = "|".join(SECTIONS)
    return re.sub(rf"<!-- ({known}):begin -->\n.*?<!-- \1:end -->", replace, text, flags=re.DOTALL)


def documents(root: Path) -> dict[Path, str]:
    """Returns path -> text of all documents with sections, these made anew from the results below ``root``."""
    return {path: filled((root / path).read_text(encoding="utf-8"), root) for path in DOCUMENTS}
