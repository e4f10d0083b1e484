"""Output of all commands: text and JSON on stdout, errors and notes on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from peerlane.results.result import Result

WIDE, PIPED_TABLE = 240, 120
"""Columns when the output is no terminal: a sentence stays on one line, and a table fits an editor."""

_MOST_REFUSED = 100


def console(*, stderr: bool = False) -> Console:
    """Returns a rich console on stdout or stderr, wide where there is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def table_room(out: Console) -> int:
    """Returns the columns that a table may take: those of the terminal, else of an editor."""
    return out.width if out.is_terminal else PIPED_TABLE


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
    results = [result for file in files for result in read_results(file, notes)]
    for note in notes:
        print_error(note)
    return results


def print_refused(refused: Sequence[str]) -> None:
    """Prints a line on stderr for each of the files that were refused, up to a hundred."""
    for text in refused[:_MOST_REFUSED]:
        print_error(text)
    if len(refused) > _MOST_REFUSED:
        print_error(f"{len(refused) - _MOST_REFUSED:,} more were refused")
