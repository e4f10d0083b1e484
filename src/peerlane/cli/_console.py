"""What all verbs share: exit codes, where text goes, and how option values are read."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from peerlane.errors import UsageError
from peerlane.settings import PROBLEM_FOLDERS

if TYPE_CHECKING:
    from rich.console import Console

    from peerlane.results.result import Result

WIDE, PIPED_TABLE = 240, 120
"""Columns when the output is no terminal: a sentence stays on one line, and a table fits an editor."""
_MOST_REFUSED = 100


class ExitCode(enum.IntEnum):
    """How a command ended."""

    OK = 0
    CHECK_FAILED = 1
    """A check found something wrong: stale pages, a machine that peerlane cannot work on, nothing that could be measured."""
    USAGE = 2
    """The request cannot be carried out; nothing was run."""
    NOT_CORRECT = 3
    """A candidate was not shown to be correct, or failed in a launch mode that was asked for; ``not_run`` and refused files count, too."""
    HARNESS = 4
    """peerlane itself failed; says nothing about any candidate."""
    INTERRUPTED = 130


def exit_code(results: Sequence[Result], *, complete: bool = True) -> ExitCode:
    """Of an evaluation: a harness failure outweighs a candidate's. ``complete``: no candidate was refused unread."""
    if any(result.verdict.kind == "harness_error" for result in results):
        return ExitCode.HARNESS
    good = all(result.correct and not any(speed.status == "failed" for speed in result.speed) for result in results)
    return ExitCode.OK if good and complete else ExitCode.NOT_CORRECT


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout or stderr, wide where there is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def table_room(out: Console) -> int:
    """Columns for a table: those of the terminal, else of an editor."""
    return out.width if out.is_terminal else PIPED_TABLE


def print_json(value: Any) -> None:
    """The one JSON object of a command that was given --json."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_error(message: str) -> None:
    """One block on stderr."""
    print(f"peerlane: {message}", file=sys.stderr)


def print_refused(refused: Sequence[str]) -> None:
    """A line on stderr for each of the files that were refused, up to a hundred."""
    for text in refused[:_MOST_REFUSED]:
        print_error(text)
    if len(refused) > _MOST_REFUSED:
        print_error(f"{len(refused) - _MOST_REFUSED:,} more were refused")


def read_result_files(files: Sequence[Path]) -> list[Result]:
    """The results in files and folders. A note on stderr says what was left out."""
    from peerlane.results.reader import read_results

    notes: list[str] = []
    results = [result for file in files for result in read_results(file, notes)]
    for note in notes:
        print_error(note)
    return results


def words(text: str, option: str) -> tuple[str, ...]:
    """A comma-separated list; raises UsageError when it holds nothing or an empty entry."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UsageError(f"{option} got {text!r}: expected one or more values separated by commas")
    return tuple(dict.fromkeys(parts))


def positive_integers(text: str, option: str) -> tuple[int, ...]:
    """A comma-separated list of integers of at least 1; raises UsageError."""
    parts = words(text, option)
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UsageError(f"{option} got {text!r}: expected positive integers separated by commas, such as 2,4")
    return tuple(int(part) for part in parts)


def one_of(text: str, allowed: Sequence[str], option: str) -> str:
    """``text`` if it is allowed; raises UsageError, naming what is."""
    if text not in allowed:
        raise UsageError(f"{option} got {text!r}: expected one of {', '.join(allowed)}")
    return text


def _use_problems(folders: list[Path] | None) -> list[Path] | None:
    if folders:
        before = [os.environ[PROBLEM_FOLDERS]] if os.environ.get(PROBLEM_FOLDERS) else []
        os.environ[PROBLEM_FOLDERS] = os.pathsep.join([*before, *map(os.path.abspath, folders)])
    return folders


ProblemFolders: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--problems", metavar="FOLDER", callback=_use_problems, is_eager=True, help="A folder of problems of your own; may be repeated."
    ),
]
"""The option of verbs that know problems. Processes that they start find the folders in the environment."""
