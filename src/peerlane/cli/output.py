"""Output of all commands: text and JSON on stdout, errors and notes on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from peerlane.report.tables import TextTable
    from peerlane.results.result import Result

WIDE, PIPED_TABLE = 240, 120
"""Columns when the output is no terminal: a sentence stays on one line, and a table fits an editor."""

_MOST_REFUSED = 100


def console(*, stderr: bool = False) -> Console:
    """Returns a rich console on stdout or stderr, wide where there is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def print_table(table: TextTable, piped: int | None = None) -> None:
    """Prints a table as a terminal has room for it; ``piped``: the room where stdout is no terminal, by default as much as it takes."""
    out = console()
    out.print(table.rich(out.width if out.is_terminal else piped))


def print_markdown(text: str) -> None:
    """Prints Markdown: drawn on a terminal, with its tables as :func:`print_table` prints them, and as it is anywhere else."""
    out = console()
    if not out.is_terminal:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    from rich.markdown import Markdown

    from peerlane.report.markdown import for_terminal

    for part in for_terminal(text):
        if isinstance(part, str):
            out.print(Markdown(part, hyperlinks=False))
        else:
            print_table(part)


def print_json(value: Any) -> None:
    """Prints the one JSON object of a command that was given --json."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_error(message: str) -> None:
    """Prints one block on stderr."""
    print(f"peerlane: {message}", file=sys.stderr)


def read_result_files(files: Sequence[Path]) -> list[Result]:
    """Reads the results in files and folders. A note on stderr says which lines were left out."""
    from peerlane.results.reader import read_results

    notes: list[str] = []
    results = [result for file in files for result in read_results(file, notes, follow=True)]
    for note in notes:
        print_error(note)
    return results


def print_refused(refused: Sequence[str]) -> None:
    """Prints a line on stderr for each of the files that were refused, up to a hundred."""
    for text in refused[:_MOST_REFUSED]:
        print_error(text)
    if len(refused) > _MOST_REFUSED:
        print_error(f"{len(refused) - _MOST_REFUSED:,} more were refused")
