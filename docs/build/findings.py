"""Tables and a picture of the page of findings: what CUDA graphs alone change, and which rung finds which race."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from docs.build.tables import table
from peerlane.evaluate.selftest import outcome
from peerlane.evaluate.selftest.run import attributed
from peerlane.evaluate.selftest.table import Entry, load
from peerlane.report.mechanisms import size_text
from peerlane.report.plots import BLACK, COLOURS, sweep_bytes
from peerlane.results.reader import read_results
from peerlane.results.result import Result

MODES_FILES = ("h200x4/references.jsonl", "h200x2/references.jsonl", "h100x2/solutions.jsonl", "h200x4/production.jsonl")
SWEEP = "h200x2/sweep.jsonl"
RUNGS = {"virtual node": ("h100x1/selftest_virtual.jsonl", "h200x1/selftest_virtual.jsonl"), "node": ("h200x2/selftest.jsonl",)}
SAME = 0.05
"""Relative difference of two times below which they count as equal."""


class Gain(NamedTuple):
    """A reference's time called one by one over that in a CUDA graph. Times are medians in microseconds a call."""

    problem: int
    slug: str
    preset: str
    eager_us: float
    graph_us: float

    @property
    def ratio(self) -> float:
        """Returns eager over graph."""
        return self.eager_us / self.graph_us


def gains(results: Iterable[Result]) -> list[Gain]:
    """Returns the gain of every reference that was timed in both modes, the largest first; of several times of one, their median."""
    times: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    for result in results:
        eager, graph = result.speed_in("eager"), result.speed_in("graph")
        if eager is not None and graph is not None:
            key = (result.problem.id, result.problem.slug, result.preset)
            times.setdefault(key, []).append((eager.reference_us.median, graph.reference_us.median))
    found = [Gain(*key, median(eager for eager, _ in both), median(graph for _, graph in both)) for key, both in times.items()]
    return sorted(found, key=lambda gain: -gain.ratio)


def launch_modes_table(folder: Path) -> str:
    """Returns a row for each file of results below ``folder``: how much faster references are in graphs, as Markdown."""
    files = {name: [result for result in read_results(folder / name) if result.correct] for name in MODES_FILES}
    found = {name: gains(results) for name, results in files.items()}
    columns: dict[str, Callable[[str], str]] = {
        "machine": lambda name: f"[{files[name][0].node.gpus}x {_short(files[name][0].node.gpu or '')}](../results/{name})",
        "sizes": lambda name: ", ".join(dict.fromkeys(gain.preset.partition("_")[0] for gain in found[name])),
        "references": lambda name: str(len(found[name])),
        "geometric mean": lambda name: f"{geometric_mean(gain.ratio for gain in found[name]):.2f}",
        "largest": lambda name: f"{found[name][0].ratio:.1f} (problem {found[name][0].problem})",
        f"within {SAME:.0%}": lambda name: str(sum(abs(gain.ratio - 1) < SAME for gain in found[name])),
    }
    return table(files, columns, words=("machine", "sizes"))


def launch_modes(figure: Any, folder: Path) -> None:
    """Draws the gains of all references of four GPUs, sorted, and those of the collectives by size, on a figure of matplotlib."""
    top, bottom = figure.subplots(2, 1)
    found = gains(read_results(folder / MODES_FILES[0]))
    top.plot(range(len(found)), [gain.ratio for gain in found], "o", color=COLOURS[0], markersize=4)
    top.set_xticks(range(len(found)), [str(gain.problem) for gain in found], fontsize=6, rotation=90)
    top.set_xlim(-1, len(found))
    top.set_xlabel("problem, at the sizes of the public benchmark; four H200", fontsize=9)
    swept = [(size, gain) for gain in gains(read_results(folder / SWEEP)) if (size := sweep_bytes(gain.preset)) is not None]
    problems = sorted({(gain.problem, gain.slug) for _, gain in swept})
    for number, (problem, slug) in enumerate(problems):
        points = sorted((size, gain.ratio) for size, gain in swept if gain.problem == problem)
        style = {"color": (*COLOURS, BLACK)[number % 8], "marker": "osD^vPX*"[number % 8], "linestyle": "-"}
        bottom.plot(*zip(*points, strict=True), label=slug, markersize=3.5, linewidth=1, **style)
    sizes = sorted({size for size, _ in swept})
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(sizes[::2], [size_text(size) for size in sizes[::2]], fontsize=8)
    bottom.set_xlabel("size of a collective; two H200", fontsize=9)
    bottom.legend(frameon=False, fontsize=7.5, ncols=2)
    for area in (top, bottom):
        area.axhline(1.0, color="#555555", linewidth=0.9)
        area.set_ylabel("times as fast in a graph", fontsize=9)
        area.set_yscale("log")
        area.set_yticks([1, 2, 4, 8, 16], ["1x", "2x", "4x", "8x", "16x"])
        area.set_ylim(0.8, 20)
        area.minorticks_off()
        area.grid(axis="y", linewidth=0.3)
        area.spines[["top", "right"]].set_visible(False)


def rungs_table(folder: Path) -> str:
    """Returns a row for each CUDA kernel of the corpus with a broken protocol: the verdicts on each rung that has GPUs, as Markdown."""
    corpus = load()
    judged = {}
    for rung, names in RUNGS.items():
        outcomes = [item for name in names for item in outcome.read_outcomes(folder / name)]
        judged[rung] = attributed(corpus, [item for item in outcomes if item.node.startswith("virtual node") == (rung == "virtual node")])
    seen = {mine.file for pairs in judged.values() for mine, _ in pairs}
    entries = [entry for entry in corpus.entries if entry.rule == "races" and entry.file in seen and entry.file.endswith("_cuda")]
    entries = [entry for entry in entries if entry.kind != "legitimate"]

    def verdicts(rung: str) -> Callable[[Entry], str]:
        return lambda entry: _counted([found.verdict for mine, found in judged[rung] if mine.file == entry.file])

    columns: dict[str, Callable[[Entry], str]] = {
        "row": lambda entry: entry.row,
        "fault": lambda entry: corpus.rows[entry.row],
        "kernel": lambda entry: f"`{re.sub(r'^1_|_cuda$', '', entry.file)}`",
        **{rung: verdicts(rung) for rung in RUNGS},
    }
    return table(entries, columns, words=columns)


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _counted(verdicts: Sequence[str]) -> str:
    return ", ".join(f"`{kind}` {count} of {len(verdicts)}" for kind, count in Counter(verdicts).most_common()) or "not judged"
