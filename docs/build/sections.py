"""Sections of documents that show committed results: what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peerlane.errors import UsageError
from peerlane.report.calibration import calibration_table
from peerlane.report.comparison import comparison_report, summary
from peerlane.report.corpus import rule_table, rules_table
from peerlane.report.evidence import CALIBRATIONS, MECHANISMS, NODE, ONE_GPU, PRODUCTION, PRODUCTION_OF_TWO, REFERENCES, RESULTS, TWO_GPUS
from peerlane.report.findings import launch_modes_table, rungs_table
from peerlane.report.kernels import LAYERS, backend_report, collectives_report, fused_report, layers_report, product_report
from peerlane.report.mechanisms import mechanisms_report, read_mechanisms
from peerlane.report.noise import acceptance_table, accuracy
from peerlane.report.operators import operators_table
from peerlane.report.production import production_section
from peerlane.report.selftest import selftest_report
from peerlane.report.sweep import MODES, sweep_table
from peerlane.report.tables import environment_lines
from peerlane.report.training import training_report
from peerlane.results.reader import read_results
from peerlane.selftest import outcome
from peerlane.selftest.calibrate import read_calibrations
from peerlane.selftest.run import attributed
from peerlane.selftest.table import FILE, load


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
}
"""Runs of the references as their own candidates, and their files."""


def _acceptance(first: Path) -> str:
    """Returns the table of the runs, the first one among them."""
    runs = {name: read_results(first.parents[1] / file) for name, file in _REPEATED.items()}
    nodes = {line: None for results in runs.values() for line in environment_lines(results)}
    return acceptance_table(runs).markdown() + "\n" + "\n\n".join(nodes)


def _sweep(path: Path) -> str:
    results = read_results(path)
    tables = [f"{mode.capitalize()} mode:\n\n{sweep_table(results, mode).markdown()}" for mode in MODES]
    return "\n".join([*tables, *environment_lines(results)])


def _margins(path: Path) -> str:
    return calibration_table(read_calibrations(path)).markdown()


def _rules(path: Path) -> str:
    return rules_table(load(path.parent)).markdown()


def _candidates_of(rule: str) -> Callable[[Path], str]:
    return lambda path: rule_table(load(path.parent), rule).markdown()


def _selftest(path: Path) -> str:
    outcomes = outcome.read_outcomes(path)
    corpus = load()
    return selftest_report(corpus, attributed(corpus, outcomes)) if outcomes else "No run is recorded here.\n"


def _operators(_: Path) -> str:
    return operators_table()


def _mechanisms(path: Path) -> str:
    return mechanisms_report(read_mechanisms(path)) if path.is_file() else "No measurement is recorded here.\n"


CORPUS = Path("tests/adversarial") / FILE
RULES = ("inputs", "outputs", "end_of_call", "clocks", "processes", "state", "types", "precision", "races", "memory", "tracks", "isolation")
"""Of the corpus; each has a page."""

_ON_H100 = ("gather", "all_reduce")
"""Parts of ``bench_layers.py`` whose newest run was on two H100."""

SECTIONS: dict[str, tuple[Path, Callable[[Path], str]]] = {
    "examples": (NODE / "examples.jsonl", _speeds),
    "production": (PRODUCTION, _speeds),
    "accuracy": (ONE_GPU / "references.jsonl", _acceptance),
    "references": (REFERENCES, _accuracy),
    "references_of_two": (TWO_GPUS / "references.jsonl", _accuracy),
    "production_of_two": (PRODUCTION_OF_TWO, _accuracy),
    "sweep_of_two": (TWO_GPUS / "sweep.jsonl", _sweep),
    "fused_production_of_two": (TWO_GPUS / "fused_production.jsonl", _speeds),
    "solutions_of_two": (TWO_GPUS / "solutions.jsonl", _speeds),
    "solutions_of_two_h100": (RESULTS / "h100x2" / "solutions.jsonl", _solutions),
    "sweep_of_two_h100": (RESULTS / "h100x2" / "sweep.jsonl", _speeds),
    "production_of_two_h100": (RESULTS / "h100x2" / "production.jsonl", production_section),
    "production_of_two_h200": (TWO_GPUS / "production_solutions.jsonl", production_section),
    "production_virtual_h200": (RESULTS / "h200x1" / "virtual_production.jsonl", production_section),
    "bandwidth_virtual_h200": (RESULTS / "h200x1" / "virtual_bandwidth.jsonl", production_section),
    "fused_of_two_h100": (RESULTS / "h100x2" / "fused.json", fused_report),
    "backend_of_two_h100": (RESULTS / "h100x2" / "backend.json", backend_report),
    "backend_of_two_h200": (TWO_GPUS / "backend.json", backend_report),
    "backend_eager_of_two_h200": (TWO_GPUS / "backend.json", partial(backend_report, mode="eager")),
    **{f"layers_{part}_of_two_h100": (RESULTS / "h100x2" / "layers.jsonl", partial(layers_report, part=part)) for part in _ON_H100},
    **{
        f"layers_{part}_of_two_h200": (TWO_GPUS / "layers.jsonl", partial(layers_report, part=part))
        for part in LAYERS
        if part not in _ON_H100
    },
    "training_of_two_h200": (TWO_GPUS / "training.jsonl", training_report),
    "backend_virtual": (ONE_GPU / "backend.json", backend_report),
    "solutions_virtual": (ONE_GPU / "virtual_solutions.jsonl", _solutions),
    "symm_mem_of_two": (TWO_GPUS / "symm_mem.jsonl", _speeds),
    "launch_modes": (REFERENCES, lambda path: launch_modes_table(path.parents[1])),
    "races_by_rung": (TWO_GPUS / outcome.FILE, lambda path: rungs_table(path.parents[1])),
    "operators": (Path("src/peerlane/ops/support.py"), _operators),
    "mechanisms": (MECHANISMS, _mechanisms),
    "collectives": (NODE / "collectives.json", collectives_report),
    "fused": (NODE / "fused.json", fused_report),
    "fused_of_two": (TWO_GPUS / "fused.json", fused_report),
    "product_of_two": (TWO_GPUS / "product.json", product_report),
    "margins_cpu": (CALIBRATIONS[0], _margins),
    "margins_gpu": (CALIBRATIONS[1], _margins),
    "corpus_rules": (CORPUS, _rules),
    **{f"corpus_{rule}": (CORPUS, _candidates_of(rule)) for rule in RULES},
    "selftest_cpu": (RESULTS / "cpu" / outcome.FILE, _selftest),
    "selftest_gpu": (ONE_GPU / outcome.FILE, _selftest),
}
"""Name of a section -> the file of results it shows, relative to the checkout, and how."""

DOCUMENTS = (
    Path("docs/measurements.md"),
    *(Path(f"docs/measurements/{name}.md") for name in ("by-size", "earlier", "exactness", "layers", "production", "virtual-node")),
    Path("docs/science.md"),
    Path("docs/calibration.md"),
    Path("docs/ops-support.md"),
    Path("docs/device/collectives.md"),
    Path("docs/tutorials/train.md"),
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


def stale(root: Path) -> list[str]:
    """Returns the documents whose sections do not match the results, each with the reason."""
    texts = {path: (root / path).read_text(encoding="utf-8") for path in DOCUMENTS}
    return [f"{path}: differs from what it shows" for path, text in texts.items() if filled(text, root) != text]


def write(root: Path) -> list[str]:
    """Makes all sections anew; returns what changed."""
    changes = stale(root)
    for path in DOCUMENTS:
        text = (root / path).read_text(encoding="utf-8")
        (root / path).write_text(filled(text, root), encoding="utf-8")
    return changes
