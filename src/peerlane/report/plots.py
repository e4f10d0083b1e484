"""Plots, as SVG or PDF: time of a sweep's cases against size, and bandwidth of the mechanisms against size.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart, and a grey; markers differ too.
"""

from __future__ import annotations

import importlib
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerlane import problems
from peerlane.common.words import counted
from peerlane.errors import MissingDependency, UsageError
from peerlane.hardware.environment import node_class
from peerlane.report.mechanisms import MeasuredMechanisms, size_text
from peerlane.report.tables import by_node

if TYPE_CHECKING:
    from peerlane.results.result import Result
    from peerlane.results.speed_record import Estimate

INSTALL = "pip install 'peerlane[plot]'"
REFERENCE = "reference"
BLACK = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
_MARKERS = "osD^vPX"
_DASHES = {"eager": "--", "graph": "-"}
_SWEEP = re.compile(r"sweep_(\d+)(kib|mib|)")
_BYTES = "size"
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""kinds of files -> metadata without the time of writing, so that equal plots give equal bytes"""
_PANEL_INCHES, _PANELS_ACROSS = (5.0, 4.0), 4


@dataclass(frozen=True)
class Point:
    """A measured value at a size, in bytes or what the panel's axis says, and the ends of its interval."""

    size: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One side's values by ascending size. ``mode``: a launch mode, or empty where there are none."""

    name: str
    mode: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``axis``: what sizes count."""

    title: str
    lines: tuple[Line, ...]
    axis: str = _BYTES


@dataclass(frozen=True)
class Plot:
    """Panels with a common title and unit. ``log``: values go on a logarithmic axis, as sizes always do."""

    title: str
    unit: str
    log: bool
    panels: tuple[Panel, ...]


def sweep_plot(results: Iterable[Result]) -> Plot:
    """Returns time against size, a panel per problem and number of ranks, a line per side and launch mode.

    Of several measurements of one thing, the reference's with every candidate for example, the median is drawn, and the interval spans all
    of theirs. Raises UsageError if no result of a sweep has a measured speed.
    """
    swept = [(result, *found) for result in results if (found := _sweep_size(result)) is not None]
    measured: list[Result] = []
    axes: dict[str, str] = {}
    estimates: dict[tuple[str, str, str], dict[int, list[Estimate]]] = {}
    for result, size, axis in sorted(swept, key=lambda item: (item[0].problem.id, item[0].world_size)):
        panel = f"{result.problem.id} {result.problem.slug}, {counted(result.world_size, 'rank')}"
        axes[panel] = axis
        for speed in result.speeds:
            measured.append(result)
            estimates.setdefault((panel, REFERENCE, speed.mode), {}).setdefault(size, []).append(speed.reference_us)
            if result.candidate.backend != REFERENCE:
                estimates.setdefault((panel, result.candidate.name, speed.mode), {}).setdefault(size, []).append(speed.candidate_us)
    if not estimates:
        raise UsageError("no result of a sweep has a measured speed: expected results of `peerlane eval ... --preset sweep` on GPUs")
    lines = {key: tuple(_together(size, found) for size, found in sorted(sizes.items())) for key, sizes in estimates.items()}
    panels = tuple(
        Panel(title, tuple(Line(name, mode, points) for (panel, name, mode), points in lines.items() if panel == title), axes[title])
        for title in dict.fromkeys(panel for panel, _, _ in lines)
    )
    if len(nodes := list(by_node(measured))) > 1:
        raise UsageError(f"got results of {' and of '.join(nodes)}: expected those of one class of machine and protocol; draw each alone")
    return Plot(f"{nodes[0]}; {_dates(result.finished_at for result in measured)}", "us per call", True, panels)


def mechanisms_plot(measured: MeasuredMechanisms) -> Plot:
    """Returns bandwidth against size, a panel per number of peers, a line per mechanism at the block count that is best at the largest
    size."""
    mechanisms = measured.mechanisms
    alone = [row for row in mechanisms.bandwidths if row.movers == 1]
    panels = []
    for peers in sorted({row.peers for row in alone}):
        rows = [row for row in alone if row.peers == peers]
        lines = []
        for mechanism in dict.fromkeys(row.mechanism for row in rows):
            mine = [row for row in rows if row.mechanism == mechanism]
            top = max(mine, key=lambda row: (row.nbytes, row.gbps))
            points = tuple(Point(row.nbytes, row.gbps, row.lowest_gbps, row.highest_gbps) for row in mine if row.blocks == top.blocks)
            name = mechanism.replace("_", " ") + (f", {top.blocks} blocks" if top.blocks else "")
            lines.append(Line(name, "", tuple(sorted(points, key=lambda point: point.size))))
        panels.append(Panel(f"GPU 0 and {peers} peer{'s' if peers > 1 else ''}", tuple(lines)))
    return Plot(f"{node_class(measured.environment)}; {measured.finished_at:%Y-%m-%d}", "10^9 bytes/s", False, tuple(panels))


def sweep_bytes(preset: str) -> int | None:
    """Returns the size in bytes that a preset of a sweep is named for; None for another preset."""
    match = _SWEEP.fullmatch(preset)
    return int(match[1]) << {"kib": 10, "mib": 20}[match[2]] if match and match[2] else None


def preset_order(preset: str) -> tuple[str, int]:
    """Returns a key that sorts presets by name, and those of a sweep by size."""
    match = _SWEEP.fullmatch(preset)
    return ("sweep", int(match[1]) << {"": 0, "kib": 10, "mib": 20}[match[2]]) if match else (preset, 0)


def _sweep_size(result: Result) -> tuple[int, str] | None:
    """Returns the size that a result of a sweep is for, and what it counts: bytes, or as its preset's description says, such as tokens."""
    if (nbytes := sweep_bytes(result.preset)) is not None:
        return nbytes, _BYTES
    if not (match := _SWEEP.fullmatch(result.preset)):
        return None
    about = next((item.about for item in problems.get(result.problem.id).family("sweep") if item.name == result.preset), "")
    return int(match[1]), about.removeprefix(match[1]).split(",")[0].strip() or _BYTES


def _together(size: int, estimates: Sequence[Estimate]) -> Point:
    median = statistics.median(estimate.median for estimate in estimates)
    return Point(size, median, min(estimate.low for estimate in estimates), max(estimate.high for estimate in estimates))


def _dates(moments: Iterable[datetime]) -> str:
    """Returns ``2026-01-02``, or the first and the last day."""
    days = sorted({f"{moment:%Y-%m-%d}" for moment in moments})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Any]:
    """Opens a matplotlib Figure of so many inches, which is written when the block ends.

    Raises MissingDependency without matplotlib, UsageError if the file's name does not end in .svg or .pdf, or it cannot be written.
    """
    if path.suffix not in _UNDATED:
        raise UsageError(f"cannot draw {path}: expected a name that ends in .svg or .pdf")
    matplotlib, figures = matplotlib_parts(""), matplotlib_parts("figure")
    # Text stays text, and the same plot gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peerlane", "pdf.fonttype": 42}):
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        yield figure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format=path.suffix[1:], metadata=_UNDATED[path.suffix])
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; name a file that can be written") from None


def matplotlib_parts(name: str) -> Any:
    """Imports matplotlib, or its module of this name; raises MissingDependency."""
    try:
        return importlib.import_module(f"matplotlib.{name}" if name else "matplotlib")
    except ImportError as error:
        raise MissingDependency(f"plots need matplotlib, which can not be imported ({error}): run {INSTALL}") from error


def write_plot(plot: Plot, path: Path) -> None:
    """Draws it; raises what :func:`figure_file` raises."""
    across = min(len(plot.panels), _PANELS_ACROSS)
    down = -(-len(plot.panels) // across)
    with figure_file(path, _PANEL_INCHES[0] * across, _PANEL_INCHES[1] * down + 0.5) as figure:
        axes = figure.subplots(down, across, squeeze=False).flatten()
        for panel, area in zip(plot.panels, axes, strict=False):
            _draw(panel, plot, area)
        for area in axes[len(plot.panels) :]:
            area.set_axis_off()
        figure.suptitle(plot.title, fontsize="large" if across > 1 else "small")


def _draw(panel: Panel, plot: Plot, area: Any) -> None:
    names = [name for name in dict.fromkeys(line.name for line in panel.lines) if name != REFERENCE]
    for line in panel.lines:
        number = None if line.name == REFERENCE else names.index(line.name)
        colour = BLACK if number is None else COLOURS[number % len(COLOURS)]
        marker = "." if number is None else _MARKERS[number % len(_MARKERS)]
        sizes = [point.size for point in line.points]
        label = f"{line.name}, {line.mode}" if line.mode else line.name
        style = {"color": colour, "marker": marker, "linestyle": _DASHES.get(line.mode, "-"), "markersize": 4, "linewidth": 1.2}
        area.plot(sizes, [point.value for point in line.points], label=label, **style)
        area.fill_between(sizes, [p.low for p in line.points], [p.high for p in line.points], color=colour, alpha=0.2, linewidth=0)
    area.set_title(panel.title)
    area.set_xscale("log", base=2)
    if plot.log:
        area.set_yscale("log")
    else:
        area.set_ylim(bottom=0)
    ticks = sorted({point.size for line in panel.lines for point in line.points})
    area.set_xticks(ticks, [size_text(size) if panel.axis == _BYTES else str(size) for size in ticks], rotation=45, ha="right")
    area.minorticks_off()
    area.set_xlabel(panel.axis)
    area.set_ylabel(plot.unit)
    area.grid(True, linewidth=0.3)
    area.legend(fontsize="x-small")
