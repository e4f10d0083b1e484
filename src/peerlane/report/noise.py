"""The A/A table: the reference judged as its own candidate. Its speedup is 1; what is measured says how far the protocol can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from peerlane.errors import UsageError
from peerlane.report.tables import TextTable, by_node, environment_lines

if TYPE_CHECKING:
    from peerlane.results.record import Mode
    from peerlane.results.result import Result
    from peerlane.results.speed_record import ModeSpeed


@dataclass(frozen=True)
class Acceptance:
    """Limits of the A/A speedups: most of them (``share``) must deviate from 1 by no more than ``most``, all by no more than ``every``."""

    most: float
    every: float
    share: float = 0.95


ACCEPTANCE: dict[Mode, Acceptance] = {"eager": Acceptance(0.05, 0.10), "graph": Acceptance(0.02, 0.04)}
"""The accuracy that the timing protocol promises on a GPU node, by launch mode."""


def noise_table(results: Iterable[Result]) -> TextTable:
    """Returns a table with a row per result of the reference and measured mode."""
    columns = ("problem", "preset", "W", "mode", "reference us", "speedup [95 %]", "deviation", "noise floor", "rounds")
    table = TextTable(columns, right={"W", "reference us", "deviation", "noise floor", "rounds"})
    for result, speed in _measured(results):
        table.add(
            f"{result.problem.id} {result.problem.slug}",
            result.preset,
            str(result.world_size),
            speed.mode,
            f"{speed.reference_us.median:.1f}",
            f"{speed.speedup.median:.3f} [{speed.speedup.low:.3f}, {speed.speedup.high:.3f}]",
            f"{deviation(speed):.1%}",
            f"{speed.noise_floor:.1%}",
            str(speed.rounds),
        )
    return table


def deviation(speed: ModeSpeed) -> float:
    """Returns how far the speedup is from 1, the larger side's way: 0.98 and 1 / 0.98 deviate alike."""
    return max(speed.speedup.median, 1 / speed.speedup.median) - 1


def acceptance_lines(results: Sequence[Result]) -> list[str]:
    """Returns a sentence per launch mode: how many problems lie within the accuracy promised, and whether that is enough."""
    return [
        f"{mode}: {found.within} of {found.problems} within {promised.most:.0%} (promised: {promised.share:.0%} of them), "
        f"largest deviation {found.largest:.1%} (promised: at most {promised.every:.0%}): {'met' if found.met else 'not met'}."
        for mode, promised in ACCEPTANCE.items()
        if (found := reached(results, mode)) is not None
    ]


class Reached(NamedTuple):
    """The accuracy of one launch mode. ``faster``: how often the reference was called faster than itself."""

    problems: int
    within: int
    largest: float
    met: bool
    faster: int


def reached(results: Iterable[Result], mode: Mode) -> Reached | None:
    """Returns the accuracy in one launch mode; None if nothing was timed in it."""
    speeds = [speed for _, speed in _measured(results) if speed.mode == mode]
    if not speeds:
        return None
    promised, deviations = ACCEPTANCE[mode], [deviation(speed) for speed in speeds]
    within, largest = sum(value <= promised.most for value in deviations), max(deviations)
    met = within >= promised.share * len(deviations) and largest <= promised.every
    return Reached(len(speeds), within, largest, met, sum(speed.faster for speed in speeds))


def noise_report(results: Iterable[Result]) -> str:
    """Returns for every class of machine its table, as Markdown, its accuracy and where it was taken; raises UsageError for none."""
    if not (timed := [result for result in results if _measured([result])]):
        raise UsageError("no result of the reference has a measured speed: expected results of `peerlane eval reference` on GPUs")
    return "\n\n".join(f"{noise_table(mine).markdown()}\n{accuracy(mine)}" for mine in by_node(timed).values())


def accuracy(results: Sequence[Result]) -> str:
    """Returns the accuracy that was reached, and where."""
    return "\n".join([*(f"* {line}" for line in acceptance_lines(results)), "", *environment_lines(results)])


def _measured(results: Iterable[Result]) -> list[tuple[Result, ModeSpeed]]:
    return [(result, speed) for result in results if result.candidate.backend == "reference" for speed in result.speeds]
