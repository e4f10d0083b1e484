"""Timelines of a reference and a candidate as one picture and one table: what computes, what communicates, what overlaps, what waits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peerlane.evaluate.audit.timeline import Shares, Timeline
from peerlane.report.plots import figure_file
from peerlane.report.tables import TextTable

ROLE_COLOURS = {
    "compute": "#0072B2", "load": "#56B4E9", "reduce": "#009E73", "store": "#E69F00", "send": "#D55E00", "signal": "#CC79A7",
    "wait": "#BBBBBB",
}  # fmt: skip
"""The colours of the kit's spans, drawn in this order because waits lie inside others."""
COLOURS = {"compute": "#0072B2", "communication": "#D55E00", "both": "#009E73", "host": "#808080"}
LABELS = {"compute": "computes", "communication": "communicates", "both": "does both", "host": "host operators"}
_CALLS_SHOWN = 2
_BLOCKS_SHOWN = 2
_CALLS_OF_GRAPH, _FIRST_OF_GRAPH = 16, 4  # between two graphs of a block the device waits for the host
_LANE = 0.8


def shares_table(timelines: Sequence[Timeline]) -> TextTable:
    """Returns a table with a row per side: microseconds per call and the shares of :class:`Shares`, of the busiest rank."""
    columns = ("side", "us per call", "measured us", "bound us", "computes", "communicates", "overlap", "idle")
    table = TextTable(columns, right=set(columns[1:]), spare=("bound us",), hidden_if_silent={"measured us"})
    for timeline in timelines:
        side_shares, labels = timeline.shares(), timeline.labels
        numbers = [f"{labels[key]:.1f}" if key in labels else "-" for key in ("measured_us", "bound_us")]
        shares = [
            f"{100 * share:.0f} %" for share in (side_shares.computing, side_shares.communicating, side_shares.overlap, side_shares.idle)
        ]
        table.add(str(labels["candidate"]), f"{side_shares.us_per_call:.1f}", *numbers, *shares)
    return table


def draw_timelines(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes an SVG: a panel per side on one time scale, a row per rank and stream, two calls of what was recorded.

    A side with roles has a row per role of two blocks of rank 0 instead.

    Raises MissingDependency without matplotlib, and UsageError for an empty timeline or a path that cannot be written.
    """
    shares = [timeline.shares() for timeline in timelines]
    shown_us = _CALLS_SHOWN * max(item.us_per_call for item in shares)
    heights = [len(_tracks(timeline)) + 1 if timeline.roles else max(2, len(_rows(timeline))) for timeline in timelines]
    with figure_file(path, 9, 1.2 + 0.7 * len(heights) + 0.26 * sum(heights)) as figure:
        panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for timeline, side_shares, panel in zip(timelines, shares, panels, strict=True):
            if timeline.roles:
                _draw_roles(panel, timeline, side_shares, shown_us)
            else:
                _draw(panel, timeline, side_shares, shown_us)
        panels[-1].set_xlabel("us")
        drawn = {span.kind for timeline in timelines for rank in range(timeline.ranks) for span in timeline.timed_spans(rank)}
        kinds = [kind for kind in COLOURS if kind in drawn]
        handles = [panels[0].broken_barh([], (0, 0), facecolors=COLOURS[kind], label=LABELS[kind]) for kind in kinds]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=8)
        labels = timelines[0].labels
        title = f"Problem {labels['problem']}, {labels['slug']}: {labels['world_size']} ranks, {labels['preset']}, {labels['mode']} mode"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)


def _rows(timeline: Timeline) -> list[tuple[int, int]]:
    return sorted({(span.rank, span.lane) for rank in range(timeline.ranks) for span in timeline.timed_spans(rank)})


def _draw(panel: Any, timeline: Timeline, side_shares: Shares, shown_us: float) -> None:
    rows = _rows(timeline)
    labels = timeline.labels
    start = _shown_from(timeline)
    for row, (rank, lane) in enumerate(rows):
        for kind, colour in COLOURS.items():
            spans = [span for span in timeline.timed_spans(rank) if span.lane == lane and span.kind == kind]
            bars = [
                (span.start_us - start, span.end_us - span.start_us)
                for span in spans
                if start <= span.end_us and span.start_us - start <= shown_us
            ]
            panel.broken_barh(bars, (row - _LANE / 2, _LANE), facecolors=colour, edgecolor="white", linewidth=0.2)
    several = len(rows) > timeline.ranks
    names = [f"rank {rank}, stream {lane}" if several else f"rank {rank}" for rank, lane in rows]
    panel.set_yticks(range(len(rows)), names)
    panel.invert_yaxis()
    panel.set_xlim(0, shown_us)
    panel.tick_params(labelsize=8)
    if "bound_us" in labels:
        panel.axvline(labels["bound_us"], color="black", linewidth=0.8, linestyle=":")
    shares = f"{100 * side_shares.overlap:.0f} % of the communication overlapped, {100 * side_shares.idle:.0f} % idle"
    panel.set_title(f"{labels['candidate']}: {side_shares.us_per_call:.1f} us per call, {shares}", loc="left", fontsize=8)


def _tracks(timeline: Timeline) -> list[tuple[int, str]]:
    """Returns blocks and roles of the first rank: the blocks are the first and the last one of those with most roles."""
    spans = [span for span in timeline.roles if span.rank == 0]
    roles = {block: len({span.role for span in spans if span.block == block}) for block in sorted({span.block for span in spans})}
    blocks = [block for block, count in roles.items() if count == max(roles.values())]
    shown = {blocks[number * (len(blocks) - 1) // (_BLOCKS_SHOWN - 1)] for number in range(_BLOCKS_SHOWN)} if blocks else set()
    return sorted({(span.block, span.role) for span in spans if span.block in shown})


def _draw_roles(panel: Any, timeline: Timeline, side_shares: Shares, shown_us: float) -> None:
    start, tracks = _shown_from(timeline), _tracks(timeline)
    for row, (block, role) in enumerate(tracks):
        own = [span for span in timeline.roles if span.rank == 0 and (span.block, span.role) == (block, role)]
        for name, colour in ROLE_COLOURS.items():
            times = [(span.start_us - start, span.end_us - start) for span in own if span.name == name]
            bars = [(begin, end - begin) for begin, end in times if end >= 0 and begin <= shown_us]
            panel.broken_barh(bars, (row - _LANE / 2, _LANE), facecolors=colour, edgecolor="white", linewidth=0.2)
    panel.set_yticks(range(len(tracks)), [f"block {block}, {role}" for block, role in tracks])
    panel.set_ylim(len(tracks) - 0.5, -0.5)
    panel.set_xlim(0, shown_us)
    panel.tick_params(labelsize=8)
    panel.set_title(f"{timeline.labels['candidate']}: {side_shares.us_per_call:.1f} us per call, roles on rank 0", loc="left", fontsize=8)
    names = {span.name for span in timeline.roles}
    for name in (name for name in ROLE_COLOURS if name in names):
        panel.broken_barh([], (0, 0), facecolors=ROLE_COLOURS[name], label=name)
    panel.legend(loc="lower right", ncols=len(ROLE_COLOURS), fontsize=7, framealpha=0.9, bbox_to_anchor=(1, 1), borderaxespad=0.2)


def _shown_from(timeline: Timeline) -> float:
    """Returns microseconds at which the calls that are drawn begin: some from the first half, or the first later ones whose roles were
    kept."""
    kept = min((span.start_us for span in timeline.roles), default=0.0)
    last = max(0, timeline.calls - _CALLS_SHOWN)
    first = min(last, _FIRST_OF_GRAPH + timeline.calls // 4 // _CALLS_OF_GRAPH * _CALLS_OF_GRAPH)
    starts = [_start_of_call(timeline, call) for call in range(first, last + 1)]
    return next((start for start in starts if start >= kept), starts[-1])


def _start_of_call(timeline: Timeline, call: int) -> float:
    """Returns microseconds at which a call begins on the first rank, if all calls have equally many spans."""
    spans = timeline.timed_spans(0)
    return spans[min(len(spans) - 1, call * len(spans) // timeline.calls)].start_us if spans else 0.0
