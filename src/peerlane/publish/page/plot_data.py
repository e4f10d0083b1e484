"""The data of a board's plots: rows of plain values, as JSON can hold them."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from peerlane import problems
from peerlane.errors import PeerlaneError
from peerlane.generate import metrics
from peerlane.generate.board import Board
from peerlane.generate.metrics import CORRECT, Metric
from peerlane.generate.samples import Sample, Task
from peerlane.results.speed_record import ModeSpeed, Utilisation

Rows = list[dict[str, Any]]
THRESHOLDS = tuple(0.125 * 2 ** (step / 8) for step in range(8 * 7 + 1))
"""Speedups of the fast_p curve: an eighth to 16, eight to a factor of two."""


class Reached(NamedTuple):
    """The share of the roofline bound that someone reached in one launch mode."""

    sample: Sample
    mode: str
    share: float
    bound: Utilisation


def speeds(board: Board) -> Iterator[tuple[Sample, ModeSpeed]]:
    """Yields every measured speed of the board's correct samples; references are left out."""
    for sample in board.samples:
        for mode in board.modes if sample.result is not None and sample.correct else ():
            if sample.result is not None and (speed := sample.result.speed_in(mode)) is not None:
                yield sample, speed


def measured_bound(utilisation: Sequence[Utilisation]) -> Utilisation | None:
    """Returns the bound by measured ceilings where there are some, else by the datasheet; None of none, or without a bound."""
    bound = next((item for item in utilisation if item.ceilings == "measured"), *utilisation[:1]) if utilisation else None
    return bound if bound is not None and bound.bound_us > 0 else None


def reached(board: Board) -> list[Reached]:
    """Returns of every task, launch mode and author the best candidate's share of the roofline; references are authors too."""
    best: dict[tuple[Task, str, str], Reached] = {}
    for sample in [*board.references, *board.samples]:
        for mode in board.modes if sample.result is not None else ():
            speed = sample.result.speed_in(mode) if sample.result is not None else None
            bound = None if speed is None else measured_bound(speed.utilisation)
            key = (sample.task, mode, sample.author)
            if bound is not None and (key not in best or best[key].share < bound.candidate):
                best[key] = Reached(sample, mode, bound.candidate, bound)
    return list(best.values())


def fast_p(board: Board) -> Rows:
    """Returns points of the fast_p curves: the expected share of tasks with a speedup above p.

    Correct samples that were not timed count as slow. ``most`` is the share without them, and without tasks that have no others.
    """
    rows: Rows = []
    for entry in board.entries:
        for mode in (mode for mode in board.modes if mode in entry.modes):
            timed = [sample for sample in entry.samples if mode in sample.speedups or not sample.correct]
            left_out = entry.attempted - {sample.task for sample in timed}
            groups = metrics.by_task(timed, [task for task in entry.tasks if task not in left_out])
            for p in THRESHOLDS:
                metric = Metric(mode, p)
                share = sum(entry.solved(metric)[0].values()) / len(entry.tasks)
                most = max(share, sum(metrics.solved(groups, metric).values()) / len(groups))
                rows.append({"author": entry.author, "mode": mode, "p": p, "share": share, "most": most, "untimed": entry.untimed[mode]})
    return rows


def verdicts(board: Board) -> Rows:
    """Counts the samples of each author by verdict."""
    return [
        {"author": entry.author, "verdict": verdict, "n": count} for entry in board.entries for verdict, count in entry.verdicts.items()
    ]


def mechanisms(board: Board) -> Rows:
    """Counts the correct samples of each author in which there is evidence for each mechanism, by its confidence."""
    counts = Counter(
        (sample.author, item.name, item.confidence)
        for sample in board.samples
        if sample.result is not None and sample.correct
        for item in sample.result.mechanisms
    )
    return [{"author": who, "mechanism": name, "confidence": sure, "n": n} for (who, name, sure), n in sorted(counts.items())]


def steps(board: Board) -> Rows:
    """Returns, of agents, the expected share of tasks solved after so many steps."""
    timed = {mode for sample in board.samples for step in sample.steps for mode in step.speedups}
    tests = {"correct": CORRECT} | {f"faster, {mode}": Metric(mode, 1.0) for mode in board.modes if mode in timed}
    return [
        {"author": entry.author, "what": what, "step": step, "share": value / len(board.tasks)}
        for entry in board.entries
        for what, metric in tests.items()
        for step, value in enumerate(metrics.step_curve(entry.samples, entry.tasks, metric), 1)
    ]


@functools.cache
def message_bytes(problem: int, preset: str, world_size: int, variant: str) -> float | None:
    """Returns the bytes that one rank must send or receive in the preset's timed case, whichever is more, on the busiest rank.

    None if this installation does not know the case, or if no rank must exchange anything.
    """
    try:
        item = problems.get(problem)
        case = item.cases(preset, world_size, variant)[0]
        costs = [item.cost(case, rank) for rank in range(world_size)]
    except PeerlaneError:
        return None
    return max(max(cost.egress_bytes, cost.ingress_bytes) for cost in costs) or None
