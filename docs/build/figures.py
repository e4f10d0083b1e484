"""A picture of how far the references are from the roofline, and all pictures that are made with the site.

These are not committed. A page names one in a comment, ``<!-- ![words](picture.svg) -->``, and the site takes the comment off: a reader of
the repository sees neither a picture nor a broken link.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from docs.build.comparison import speedups
from docs.build.dependence import find_dependence
from docs.build.evidence import COUNTED_WORLD_SIZE, RESULTS, TWO_GPUS, read_evidence
from docs.build.findings import launch_modes
from docs.build.pages import FOLDER, page_name
from docs.build.shard_diagram import shard_diagram
from docs.build.tables import table
from peerlane import problems
from peerlane.problems import Problem
from peerlane.report.catalogue import page_world_size, problem_detail, timed_case
from peerlane.report.evidence import NOTHING, Evidence, ReferenceTime
from peerlane.report.plots import COLOURS, figure_file, sweep_plot, write_plot
from peerlane.results.reader import read_results

COMMENTED = re.compile(r"<!-- (!\[[^\]]*\]\(([^)\s]+)\)) -->")
BOUNDS = ("tensor", "vector", "hbm", "nvlink", "latency")
_BINS = tuple(10 ** (exponent / 4) for exponent in range(-20, 1))
_PICTURED = "pkb"
PANELS = {"pkb on 4x H200": ("pkb", 4), "production on 2x H200": ("production", 2)}
"""Title -> family of presets and number of ranks."""


def pictures(root: Path) -> dict[Path, Callable[[Path], None]]:
    """Returns path in the documentation -> what draws the picture into a file, from the results below ``root``."""
    images, solutions = Path("docs/images"), root / RESULTS / "h100x2" / "solutions.jsonl"
    evidence = cache(lambda: read_evidence(root))
    drawn: dict[Path, Callable[[Path], None]] = {
        images / "references.svg": lambda path: _draw(path, (11.0, 4.0), partial(references, evidence=evidence())),
        images / "solutions.svg": lambda path: _draw(path, (11.0, 3.9), partial(speedups, results=read_results(solutions))),
        images / "launch-modes.svg": lambda path: _draw(path, (7.4, 5.8), partial(launch_modes, folder=root / RESULTS)),
        images / "sweep_h100x2.svg": lambda path: _sweep(path, solutions.with_name("sweep.jsonl")),
        Path("docs/device/sweep_of_two.svg"): lambda path: _sweep(path, root / TWO_GPUS / "sweep.jsonl"),
    }
    for problem in problems.suite(None):
        picture = FOLDER / page_name(problem).replace(".md", ".svg")
        drawn[picture] = partial(_draw_problem, problem, evidence)
    return drawn


def _draw(path: Path, inches: tuple[float, float], draw: Callable[[Any], None]) -> None:
    with figure_file(path, *inches) as figure:
        draw(figure)


def _sweep(path: Path, file: Path) -> None:
    write_plot(sweep_plot(read_results(file)), path)


def _draw_problem(problem: Problem, evidence: Callable[[], Evidence], path: Path) -> None:
    """Draws shards and messages; amounts are those of the timed case of `pkb`, where the world size has one."""
    ranks = page_world_size(problem)
    (preset,) = problem_detail(problem, world_size=ranks, presets=[_PICTURED])["presets"]
    timed = timed_case(preset)
    case = next((case for case in problem.cases(_PICTURED, ranks) if timed and case.label == timed["label"]), None)
    costs = [] if case is None else [problem.cost(case, rank) for rank in range(ranks)]
    steps = evidence().get(problem.id, NOTHING).steps if ranks == COUNTED_WORLD_SIZE else ()
    picture = shard_diagram(
        find_dependence(problem, ranks, costs),
        shapes={} if timed is None else {item["name"]: item["value"] for item in timed["arguments"] or ()},
        costs=costs,
        steps=steps,
        title=f"{problem.title}, on {ranks} ranks",
        preset=_PICTURED,
    )
    path.write_text(picture, encoding="utf-8")


def headroom(evidence: Evidence, family: str, world_size: int) -> dict[int, ReferenceTime]:
    """Returns by problem the reference nearest to its bound among the family's presets; problems without a bound are left out."""
    best: dict[int, ReferenceTime] = {}
    for number, measured in evidence.items():
        times = [item for item in measured.times if item.preset.split("_")[0] == family and item.world_size == world_size]
        times = [item for item in times if item.bound_us > 0 and item.utilisation > 0]
        if times:
            best[number] = max(times, key=lambda item: item.utilisation)
    return best


def headroom_table(evidence: Evidence) -> str:
    """Returns how many references reach which share of their bounds, as Markdown."""
    nearest = {title: headroom(evidence, *family).values() for title, family in PANELS.items()}

    def below(limit: float) -> Callable[[str], str]:
        return lambda title: str(sum(item.utilisation < limit for item in nearest[title]))

    columns: dict[str, Callable[[str], str]] = {
        "sizes": lambda title: title,
        "references": lambda title: str(len(nearest[title])),
        **{f"below {limit:.0%} of the bound": below(limit) for limit in (0.01, 0.1, 0.5)},
    }
    return table(PANELS, columns, words=("sizes",))


def references(figure: Any, evidence: Evidence) -> None:
    """Draws what bounds the references, and the share of the bound that they reach, on a figure of matplotlib."""
    areas = figure.subplots(1, len(PANELS), sharey=True)
    for area, (title, family) in zip(areas, PANELS.items(), strict=True):
        nearest = headroom(evidence, *family)
        shares = {bound: [item.utilisation for item in nearest.values() if item.bound_by == bound] for bound in BOUNDS}
        present = {bound: values for bound, values in shares.items() if values}
        labels = [f"{bound}: {len(values)}" for bound, values in present.items()]
        colours = [COLOURS[BOUNDS.index(bound)] for bound in present]
        area.hist(list(present.values()), bins=_BINS, stacked=True, color=colours, label=labels, edgecolor="white", linewidth=0.5)
        below = [sum(item.utilisation < limit for item in nearest.values()) for limit in (0.1, 0.5)]
        area.set_title(f"{title}: {len(nearest)} references\n{below[0]} below 10 %, {below[1]} below 50 % of the bound", fontsize=10.5)
        for limit in (0.1, 0.5):
            area.axvline(limit, color="#555555", linewidth=0.8, linestyle=":")
            area.text(limit, 0.98, f" {limit:.0%}", transform=area.get_xaxis_transform(), ha="left", va="top", fontsize=8)
        area.set_xscale("log")
        area.set_xlim(1e-5, 1.2)
        area.set_xticks([1e-4, 1e-3, 0.01, 0.1, 1.0], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"], fontsize=9)
        area.minorticks_off()
        area.set_xlabel("share of the roofline bound that the reference reaches")
        area.legend(title="bound by", fontsize="small", frameon=False, loc="upper left")
        area.spines[["top", "right"]].set_visible(False)
    areas[0].set_ylabel("references")
    areas[0].yaxis.get_major_locator().set_params(integer=True)
