"""Production sizes: verdict, speed, bound and best library of every problem, and why some kernels are slower than the reference."""

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median

from docs.build.comparison import MODES, comparison_report, summary
from docs.build.tables import table, time_us
from peerlane import problems
from peerlane.common.words import counted
from peerlane.hardware.ceilings import Ceilings
from peerlane.report.bounds import attainable_us, bound_us
from peerlane.report.tables import microseconds
from peerlane.results.reader import last_right, read_results
from peerlane.results.result import Result

CHANGED = 1.1
"""times as fast as before, from which a kernel is listed"""
EARLIER = " (version 1)"
"""Behind a time by the earlier version of the timing protocol."""
SLOWER = 0.95
"""A speedup below this is explained."""

WHY_ON_SHARES = "probably that its blocks hold a share of the SMs and launch no clusters; the reference's products have all SMs in turn"
REASONS: Mapping[str, Mapping[int, str]] = {"virtual": dict.fromkeys((11, 13, 15, 16, 32, 49, 50, 51), WHY_ON_SHARES)}
"""Why a kernel is slower than the reference at a production size, by kind of node and problem. Written by hand, here and nowhere else."""

FAR: Mapping[int, str] = {
    **dict.fromkeys((1, 5, 23), "the launch and one trip of a packet"),
    10: "ids are counted, sent and answered, with a meeting of the ranks' blocks behind each step",
    24: "one pass, then sums of a warp, a block, a rank and all ranks, each behind the last. What takes the rest is not known",
    26: "the host waits for the counts",
    28: "rows are numbered, places asked for and answered before a token leaves, and tokens of other ranks are copied once more",
    29: "places are asked for and answered before a row is added up",
    30: "two launches and one trip of a packet",
    44: "codes go to all ranks in one shot, behind a pass for the scales",
    47: "products and the exchange of gradients, in part one behind the other",
    **dict.fromkeys(
        (52, 53), "the largest value of all is known before the first code is made: a pass, a meeting, a pass, a barrier, a pass"
    ),
    57: "attention's gradients take longer than the model says, which counts their operations at the rate of a large product",
    58: "logits go to memory and come back between the product and the loss. The bound has neither",
    61: "rows are packed, sent and unpacked, and the host waits for their number",
    62: "taps are multiplied in float32, and channels are mixed behind that",
    63: "the host asks for sizes before the launch. A kernel that did not ask was slower",
    64: "four meetings of the ranks' blocks a hop, one behind the other",
    **dict.fromkeys((65, 66), "parts begin where other ranks say: a meeting before a row leaves"),
    68: "the host waits for the number of rows that all ranks want",
    69: "hosts tell each other their numbers of edges before the launch",
    70: "lengths are added up on all ranks before a bag leaves, and the host waits for the sizes",
    72: "complex numbers go to memory and come back between the steps of a transform. A product with more in registers gained 6 %",
    74: "chunks are a chain: the second rank begins where the first one ends",
    79: "similarities go to memory and are read three times. A shard is copied where its rows begin at odd addresses",
    80: "logits are read seven times. A kernel that reads them four times took as long",
    81: "overlaps are counted behind a barrier, and masks are written as float32, four times the bytes that come",
    **dict.fromkeys((82, 83, 84), "candidates are counted more slowly than logits are read. Bulk copies ahead of the count made it slower"),
    85: "each pass of the sort takes more than twice a copy of its bytes",
    87: "the image is turned before the product, and the result behind it",
}
"""What holds a kernel that is far from its bound at a production size on two H200, by problem. Written by hand."""
NEAR, NEAR_ATTAINABLE = 0.5, 0.8
"""Shares of the bound and of the attainable time, either of which a kernel reaches that is not far."""

NO_RUN = "No run is recorded here."


def production_section(path: Path) -> str:
    """Returns the table of a file of results below lines that sum it up, and what is slower than the reference, with the reason.

    ``libraries.jsonl`` beside it has the results of libraries, and ``ceilings.json`` the rates of the node. A file that does not exist is a
    run that has not been made.
    """
    if not path.is_file():
        return NO_RUN
    every = [result for result in read_results(path) if result.timing_protocol != "kittens"]
    results, libraries = last_of_newest_protocol(every), path.with_name("libraries.jsonl")
    rivals, measured = read_results(libraries) if libraries.is_file() else [], path.with_name("ceilings.json")
    ceilings = Ceilings.from_json(json.loads(measured.read_text(encoding="utf-8"))) if measured.is_file() else None
    parts = [*summary(results), *_wrong(results), *_left_out(every, results), ""]
    parts += [comparison_report(results, rivals, ceilings), "", *slower_lines(results)]
    if ceilings:
        parts += [*far_lines(results, ceilings), *algorithm_lines(results, ceilings)]
    parts += changes_lines(every)
    return "\n".join(parts).rstrip()


def public_protocol_section(path: Path) -> str:
    """Returns the table of a file of results by the public timing protocol."""
    return comparison_report(read_results(path)) if path.is_file() else NO_RUN


def far_lines(results: Sequence[Result], ceilings: Ceilings) -> list[str]:
    """Returns a line that counts the kernels near their bound or attainable time, and one for each other kernel, with what holds it."""
    lines = []
    for result in sorted(results, key=lambda item: item.problem.id):
        speed = next((speed for mode in MODES if (speed := result.speed_in(mode)) is not None), None)
        bound, steps = bound_us(result), attainable_us(result, ceilings)
        if speed is None or bound is None:
            continue
        us = speed.candidate_us.median
        if bound / us >= NEAR or (steps is not None and sum(steps.values()) / us >= NEAR_ATTAINABLE):
            continue
        launch_us = (median(speed.candidate_launch_us or (0.0,)) - speed.copies_launch_us) / speed.calls_per_block
        host = f"the host works or waits for {time_us(launch_us)} of {time_us(us)} us" if launch_us >= NEAR * us else ""
        why = ". ".join(part[0].upper() + part[1:] for part in (host, FAR.get(result.problem.id, "not known yet")) if part)
        lines.append(f"* {result.problem.id} {result.problem.slug}: {why}.")
    near = len([result for result in results if result.speed]) - len(lines)
    return ["", f"{near} kernels take at most twice the bound, or 1.25 times what is attainable. What holds the others:", "", *lines]


def algorithm_lines(results: Sequence[Result], ceilings: Ceilings) -> list[str]:
    """Returns a line for every problem with an algorithm whose time is modelled, with its steps; or with the reason why there is none."""
    lines = []
    for result in sorted(results, key=lambda item: item.problem.id):
        known, steps = problems.get(result.problem.id).attainable, attainable_us(result, ceilings)
        if isinstance(known, str):
            text = f"none: {known}" if known else ""
        else:
            times = "not measured" if steps is None else "; ".join(f"{name} {time_us(us)}" for name, us in steps.items())
            text = f"{known.name} ({known.source}). Steps: {times}"
        lines += [f"* {result.problem.id} {result.problem.slug}: {text}."] if text else []
    rates = f"the rates measured on {ceilings.node} on {ceilings.taken_at[:10]}"
    return ["", f"Algorithms of the column *attainable*, with the time of each step in microseconds, computed at {rates}.", "", *lines, ""]


def changes_lines(results: Sequence[Result]) -> list[str]:
    """Returns a table with a row for each problem whose last correct run is quicker than its first, in its first mode of the two; nothing
    without any. The first one is of the last one's version of the timing protocol, if there are two such runs; else the row is marked."""
    rows = []
    questions: dict[tuple[object, ...], list[Result]] = {}
    for result in sorted(results, key=lambda item: item.problem.id):
        if result.correct and result.speed:
            questions.setdefault((result.problem.id, result.preset, result.world_size, result.node), []).append(result)
    for runs in questions.values():
        for mode in MODES:
            timed = [(item.timing_protocol, speed) for item in runs if (speed := item.speed_in(mode)) and not speed.copies_matter]
            alike = [pair for pair in timed if pair[0] == timed[-1][0]]
            first, mark = (alike[0][1], "") if len(alike) > 1 else (timed[0][1], EARLIER) if len(timed) > 1 else (None, "")
            if first is None or (ratio := first.candidate_us.median / timed[-1][1].candidate_us.median) < CHANGED:
                continue
            last = timed[-1][1]
            reference, before, now = map(microseconds, (last.reference_us, first.candidate_us, last.candidate_us))
            rows.append((f"{runs[0].problem.id} {runs[0].problem.slug}", mode, reference, before + mark, now, f"{ratio:.2f}"))
            break
    names = ("problem", "mode", "reference", "kernel before", "kernel now", "times as fast")
    columns = {name: itemgetter(place) for place, name in enumerate(names)}
    return ["", "Kernels that became quicker, with times in microseconds.", "", table(rows, columns, words=names[:2])] if rows else []


def slower_lines(results: Sequence[Result]) -> list[str]:
    """Returns a line for every kernel that is clearly slower than the reference in a launch mode, with the reason if it is known."""
    lines = []
    for result in sorted(results, key=lambda item: item.problem.id):
        speeds = [(mode, speed.speedup.median) for mode in MODES if (speed := result.speed_in(mode)) is not None]
        if slow := [f"{speedup:.2f} in {mode} mode" for mode, speedup in speeds if speedup < SLOWER]:
            why = REASONS.get(result.node.kind, {}).get(result.problem.id, "not known yet")
            lines.append(f"* {result.problem.id} {result.problem.slug}: {', '.join(slow)}. Reason: {why.rstrip('.')}.")
    return [f"Slower than {SLOWER:g} times the reference:", "", *lines] if lines else []


def last_of_newest_protocol(results: Sequence[Result]) -> list[Result]:
    """Returns the last correct results, of the newest version of the timing protocol among them: two versions are in no mean."""
    newest = max(int(result.timing_protocol) for result in results if result.timing_protocol != "kittens")
    return last_right(result for result in results if result.timing_protocol == newest)


def _left_out(every: Sequence[Result], results: Sequence[Result]) -> list[str]:
    numbers = sorted({result.problem.id for result in every} - {result.problem.id for result in results})
    return [f"* timed by an earlier version of the protocol only: {', '.join(map(str, numbers))}."] if numbers else []


def _wrong(results: Sequence[Result]) -> list[str]:
    """Returns a line that counts the verdicts other than correct; none without any."""
    kinds = [result.verdict.kind for result in results if not result.correct]
    each = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return [f"* {counted(len(kinds), 'problem')} without a speed: {each}."] if kinds else []
