"""Progress of an evaluation, on stderr: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from peerlane.cli.output import console

if TYPE_CHECKING:
    from peerlane.results.result import Result


_WIDE_BAR = 100
"""Columns of a terminal on which the bar takes twenty."""


def summary(result: Result) -> str:
    """Returns one line for a result: candidate, case and verdict. The reason stands below the table of results."""
    where = f"{result.candidate.name}  problem {result.problem.id} {result.preset} W={result.world_size}"
    return f"{where}  {result.verdict.kind}"


class PlainProgress:
    """A line for every finished evaluation."""

    def __init__(self) -> None:
        self._total = 0
        self._done = 0

    def started(self, total: int, skipped: int) -> None:
        self._total, self._done = total, 0
        self.note(starting(total, skipped))

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        pass  # a line per phase would bury the verdicts

    def finished(self, result: Result) -> None:
        self._done += 1
        self.note(f"[{self._done}/{self._total}] {summary(result)}")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveProgress:
    """A bar with the phase at work; verdicts scroll above it. Where the line has no room, the end of the description is left out."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        out = console(stderr=True)
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=20 if out.width >= _WIDE_BAR else 8),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        )
        # stdout stays untouched: it may be carrying JSON.
        self.bar = Progress(*columns, console=out, transient=True, redirect_stdout=False, expand=True)
        self._task = self.bar.add_task("starting", total=None)

    def started(self, total: int, skipped: int) -> None:
        self.bar.reset(self._task, total=total)
        self.note(starting(total, skipped))

    def phase(self, candidate: str, problem: int, preset: str, world_size: int, phase: str) -> None:
        self.bar.update(self._task, description=f"{phase}: {candidate}  problem {problem} {preset} W={world_size}")

    def finished(self, result: Result) -> None:
        self.bar.advance(self._task)
        self.note(summary(result))

    def note(self, text: str) -> None:
        self.bar.console.print(text)


def starting(total: int, skipped: int) -> str:
    """Returns a sentence that says how much the run is about to do."""
    done = f"; {skipped} already done with this evaluator and skipped" if skipped else ""
    return f"{total} evaluation{'' if total == 1 else 's'} to run{done}"


@contextmanager
def progress() -> Iterator[PlainProgress | LiveProgress]:
    """Gives the progress that suits stderr."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    live = LiveProgress()
    with live.bar:
        yield live
