"""Kernels beside their references: one row a problem, both launch modes side by side, and a picture of all speedups."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from docs.build.libraries import best_library
from peerlane.common.words import counted
from peerlane.hardware.ceilings import Ceilings
from peerlane.report.bounds import attainable_us, bound_us
from peerlane.report.plots import COLOURS, preset_order
from peerlane.report.tables import TextTable, by_node, environment_lines, microseconds, percent, shown_speedup
from peerlane.results.record import Mode
from peerlane.results.result import Result
from peerlane.results.speed_record import ModeSpeed

MODES: tuple[Mode, ...] = ("graph", "eager")
ATTAINABLE, LIBRARY = "attainable (model)", "best library"
NONE = "–"
"""in a cell without a figure"""


def summary(results: Sequence[Result]) -> list[str]:
    """Returns a line on correctness, one for each launch mode with its geometric mean, and one with the best kernels."""
    lines = [f"* {counted(len({result.problem.id for result in results if result.correct}), 'problem')} correct."]
    for mode in MODES:
        speeds = [speed for result in results if (speed := result.speed_in(mode)) is not None]
        sure = [speed.speedup.median for speed in speeds if not speed.copies_matter]
        if sure:
            faster, left_out = sum(speed.faster for speed in speeds), len(speeds) - len(sure)
            of = f"the {len(sure)} without (copies)" if left_out else "those timed"
            lines.append(
                f"* {mode}: {counted(len(speeds), 'problem')} timed, {faster} faster; geometric mean of {of} {geometric_mean(sure):.2f}."
            )
    return [*lines, *_best(results)]


def _best(results: Sequence[Result]) -> list[str]:
    """Returns a line that names the kernel with the largest speedup, and the one that is nearest to its bound; none without speeds."""
    known = [(speed, mode, result) for mode in MODES for result in results if (speed := result.speed_in(mode)) is not None]
    speeds = [(speed.speedup.median, mode, result) for speed, mode, result in known if not speed.copies_matter]
    shares = [(share, result) for result in results if (share := _share_of(bound_us(result), result)) is not None]
    if not speeds or not shares:
        return []
    speedup, mode, fastest = max(speeds, key=lambda item: item[0])
    share, nearest = max(shares, key=lambda item: item[0])
    names = [f"{result.problem.id} {result.problem.slug}" for result in (fastest, nearest)]
    return [f"* largest speedup: {speedup:.2f}, of {names[0]} in {mode} mode; nearest to its bound: {names[1]}, at {percent(share)} of it."]


def comparison_report(results: Iterable[Result], libraries: Sequence[Result] | None = None, ceilings: Ceilings | None = None) -> str:
    """Returns :func:`comparison_table` for every class of machine, as Markdown, with the machine and the reasons of empty cells."""
    groups = by_node(results)
    parts = []
    for node, mine in groups.items():
        head = f"Results of {node}, which compare with no others here:\n\n" if len(groups) > 1 else ""
        notes = "\n".join(f"* {line}" for line in _gaps(mine))
        where = "\n\n".join(environment_lines(mine))
        parts.append(f"{head}{comparison_table(mine, libraries, ceilings).markdown()}\n{where}\n\n{notes}".rstrip())
    return "\n\n".join(parts)


def comparison_table(results: Sequence[Result], libraries: Sequence[Result] | None = None, ceilings: Ceilings | None = None) -> TextTable:
    """Returns one row for each problem and preset: the bound, and for each launch mode the medians of reference and kernel in microseconds,
    and the speedup; last the share of the bound that the kernel reaches in its faster mode. Columns that are the same in every row are left
    out. ``libraries``: results of candidates that call a library, the fastest of which gets a column; with None there is none.
    ``ceilings``: the rates at which the times of known algorithms are modelled, in two more columns."""
    bounded = any(bound_us(result) is not None for result in results)
    columns: dict[str, Callable[[Result], str]] = {"problem": lambda result: f"{result.problem.id} {result.problem.slug}"}
    if len({(result.problem.id, result.preset) for result in results}) < len(results):
        columns["kernel"] = lambda result: result.candidate.name
    if len({result.preset for result in results}) > 1:
        columns["preset"] = lambda result: result.preset.removeprefix("production_").removeprefix("sweep_")
    if bounded:
        columns["bound"] = lambda result: _time(bound_us(result))
    for mode in MODES:
        if any(result.speed_in(mode) is not None for result in results):
            for place, what in enumerate(("reference", "kernel", "speedup")):
                columns[f"{mode}: {what}"] = lambda result, mode=mode, place=place: _cells(result.speed_in(mode))[place]  # type: ignore[misc]
    if bounded:
        columns["of bound"] = lambda result: _share(bound_us(result), result)
    if ceilings is not None:
        columns[ATTAINABLE] = lambda result: _time(_attained_us(result, ceilings))
        columns[f"of {ATTAINABLE}"] = lambda result: _share(_attained_us(result, ceilings), result)
    if libraries is not None:
        columns[LIBRARY] = lambda result: best_library(result, libraries)
    table = TextTable(tuple(columns), right=columns.keys() - {"problem", "kernel", "preset", LIBRARY})
    for result in sorted(results, key=lambda item: (item.problem.id, preset_order(item.preset), item.candidate.name)):
        table.add(*(show(result) for show in columns.values()))
    return table


def speedups(figure: Any, results: Sequence[Result]) -> None:
    """Draws every problem's speedup in both launch modes on a figure of matplotlib, sorted by that of the graph mode."""
    area = figure.subplots()
    known = {result.problem.id: result for result in results if any(result.speed_in(mode) for mode in MODES)}
    order = sorted(known, key=lambda number: (known[number].speed_in("graph") is None, -_first_speedup(known[number])))
    places = {number: place for place, number in enumerate(order)}
    for mode, colour, marker in zip(("eager", "graph"), (COLOURS[1], COLOURS[0]), ("D", "o"), strict=True):
        speeds = [(places[number], speed) for number in order if (speed := known[number].speed_in(mode)) is not None]
        points = [(place, speed.speedup.median) for place, speed in speeds]
        if points:
            mean = geometric_mean([speed.speedup.median for _, speed in speeds if not speed.copies_matter] or [math.nan])
            label = f"{mode}: {len(points)} problems, geometric mean {mean:.2f}"
            area.plot(*zip(*points, strict=True), marker, color=colour, markersize=4.5 if mode == "graph" else 3.5, label=label, alpha=0.9)
    area.axhline(1.0, color="#555555", linewidth=0.9)
    area.set_yscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 3, 5, 10, 20, 50, 100) if tick <= 1.3 * max(area.get_ylim()[1], 2)]
    area.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    area.minorticks_off()
    area.set_xticks(range(len(order)), [str(number) for number in order], fontsize=6.5, rotation=90)
    area.set_xlim(-1, len(order))
    area.set_xlabel("problem, by the speedup of the graph mode; on the right those with an eager one alone", fontsize=9)
    area.set_ylabel("times as fast as the reference", fontsize=9)
    area.legend(frameon=False, fontsize=9, loc="upper right")
    area.spines[["top", "right"]].set_visible(False)


def _first_speedup(result: Result) -> float:
    return next(speed.speedup.median for mode in ("graph", "eager") if (speed := result.speed_in(mode)) is not None)


def _cells(speed: ModeSpeed | None) -> tuple[str, str, str]:
    if speed is None:
        return NONE, NONE, NONE
    sure = " (copies)" if speed.copies_matter else "" if speed.faster or speed.speedup.high < 1 else " (noise)"
    return microseconds(speed.reference_us), microseconds(speed.candidate_us), f"{shown_speedup(speed):.2f}{sure}"


def _attained_us(result: Result, ceilings: Ceilings) -> float | None:
    steps = attainable_us(result, ceilings)
    return None if steps is None else sum(steps.values())


def _time(us: float | None) -> str:
    return NONE if us is None else f"{us:.3g}" if us < 100 else f"{us:.0f}"


def _share(least_us: float | None, result: Result) -> str:
    share = _share_of(least_us, result)
    return NONE if share is None else "<1%" if share < 0.005 else f"{share:.0%}"


def _share_of(least_us: float | None, result: Result) -> float | None:
    """Returns this time over the kernel's, in its faster mode; None where copies are too much of that time."""
    fastest = min(result.speeds, key=lambda speed: speed.candidate_us.median, default=None)
    return None if least_us is None or fastest is None or fastest.copies_matter else least_us / fastest.candidate_us.median


def _gaps(results: Sequence[Result]) -> list[str]:
    """Returns why cells are empty: results that are not correct, modes that failed, and the reasons why modes were not measured."""
    lines: list[str] = []
    unmeasured: dict[str, set[int]] = {}
    for result in results:
        name = f"{result.problem.id} {result.problem.slug}"
        if not result.correct:
            lines.append(f"{name}: {result.verdict.kind}: {result.verdict.reason.rstrip('.')}.")
        for item in result.speed:
            if item.status == "failed":
                lines.append(f"{name}, {item.mode}: {item.kind}: {item.reason.rstrip('.')}.")
            if item.status == "not_measured":
                unmeasured.setdefault(item.why.partition(":")[0], set()).add(result.problem.id)
    return [*lines, *(f"{_cause(why)}: {', '.join(map(str, sorted(numbers)))}." for why, numbers in unmeasured.items())]


def _cause(why: str) -> str:
    return {"the reference cannot be captured": "The reference cannot be captured in a graph"}.get(why, why[:1].upper() + why[1:])
