"""Sections of a problem's page with measured times: the reference's, and those of the solution that comes with peerlane."""

import math
from collections.abc import Mapping

from peerlane.report.catalogue import Entry
from peerlane.report.evidence import Measured, PublicTimes, ReferenceTime
from peerlane.report.tables import TextTable, shown_us

EARLIER = "Times are of an [earlier timing protocol](../measurements/earlier.md)."
FAR = 0.3
"""A reference whose eager time differs from the public benchmark's by more than this share has a page that says why."""


def solution_times(measured: Measured) -> str:
    """Returns a table of the solution beside the reference, one row for each machine, preset and launch mode."""
    if not measured.solutions:
        return "It has not been timed yet.\n"
    columns = ("node", "ranks", "preset", "mode", "reference us", "solution us", "speedup", "of bound")
    table = TextTable(columns, right={"ranks", "reference us", "solution us", "speedup", "of bound"})
    for item in measured.solutions:
        sure = "" if item.certain else " (noise)"
        share = "–" if item.utilisation is None else f"{item.utilisation:.0%}" if item.utilisation >= 0.1 else f"{item.utilisation:.1%}"
        times = (_median(item.reference_us), _median(item.solution_us), f"{item.speedup:.2f}{sure}")
        table.add(item.machine, str(item.world_size), f"`{item.preset}`", item.mode, *times, share)
    lines = [table.markdown(), _what_it_says(measured)]
    return "\n".join(lines)


def _median(value_us: float) -> str:
    return f"{value_us:.1f}" if value_us < 100 else f"{value_us:,.0f}"


def _what_it_says(measured: Measured) -> str:
    sentences = [
        "Times are medians per call, and each row is the newest correct run.",
        "Runs differ, so do not compare rows.",
        "*Of bound* is the bound over our time.",
    ]
    if any(item.virtual for item in measured.solutions):
        sentences.append(
            "On a [virtual node](../one-gpu.md) all ranks share one GPU and the reference runs on the kit's own collectives: those rows "
            "say nothing about links or NCCL."
        )
    if any(not item.virtual for item in measured.solutions):
        sentences.append("On nodes the reference runs on NCCL, without NVLink multicast.")
    return " ".join(sentences) + "\n"


def reference_section(detail: Entry, measured: Measured) -> str:
    """Returns measured times of the reference, beside those of the public benchmark where these are recorded."""
    parts = []
    if not measured.times:
        return "No measurement is recorded here.\n"
    runs: dict[tuple[str, int], dict[str, ReferenceTime]] = {}
    for time in measured.times:
        runs.setdefault((time.preset, time.world_size), {})[time.mode] = time
    columns = ("preset", "ranks", "eager us", "graph us", "bound us", "bound by", "best of bound")
    table = TextTable(columns, right=set(columns) - {"preset", "bound by"})
    for (preset, ranks), modes in runs.items():
        best = max(modes.values(), key=lambda time: time.utilisation)
        times = (shown_us(modes[mode].reference_us) if mode in modes else "-" for mode in ("eager", "graph"))
        table.add(f"`{preset}`", str(ranks), *times, shown_us(best.bound_us), best.bound_by, f"{best.utilisation:.1%}")
    parts.append(f"One H200 for each rank; bounds from the node's measured ceilings. {EARLIER}\n\n{table.markdown()}")
    own = measured.reference_us("pkb")
    if measured.public is not None and "eager" in own:
        parts.append(f"{beside_public(measured.public, own)} {detail['speed_note']}".rstrip() + "\n")
    return "\n".join(parts)


def beside_public(public: PublicTimes, own_us: Mapping[str, float]) -> str:
    """Returns sentences that compare the reference's times by launch mode with those of the public benchmark, and explain a large
    difference if the times can."""
    eager_us, graph_us = own_us["eager"], own_us.get("graph", math.inf)
    times = f"{shown_us(public.mean_us)} us per call in eager mode on such a node, this one {shown_us(eager_us)} us"
    sentences = [f"The public benchmark's reference takes {times}."]
    if eager_us > (1 + FAR) * public.mean_us and graph_us <= (1 + FAR) * public.mean_us:
        sentences.append(
            f"The host makes the difference: replayed from a graph this one takes {shown_us(graph_us)} us. The public calls were timed "
            "back to back, so launches overlap with kernels. Here every call is timed by itself, on a shared host."
        )
    if eager_us < (1 - FAR) * public.mean_us and eager_us >= (1 - FAR) * public.min_us:
        sentences.append(f"The public one's calls vary: the shortest took {shown_us(public.min_us)} us.")
    return " ".join(sentences)
