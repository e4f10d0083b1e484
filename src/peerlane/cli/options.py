"""Values of options, as all commands read them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from peerlane.errors import UsageError
from peerlane.settings import PROBLEM_FOLDERS, problem_folders


def words(text: str, option: str) -> tuple[str, ...]:
    """Splits a comma-separated list; raises UsageError when it holds nothing or an empty entry."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UsageError(f"{option} got {text!r}: expected one or more values separated by commas")
    return tuple(dict.fromkeys(parts))


def positive_integers(text: str, option: str) -> tuple[int, ...]:
    """Parses a comma-separated list of integers of at least 1; raises UsageError."""
    parts = words(text, option)
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UsageError(f"{option} got {text!r}: expected positive integers separated by commas, such as 2,4")
    return tuple(int(part) for part in parts)


def one_of(text: str, allowed: Sequence[str], option: str) -> str:
    """Returns ``text`` if it is allowed; raises UsageError that names the allowed words."""
    if text not in allowed:
        raise UsageError(f"{option} got {text!r}: expected one of {', '.join(allowed)}")
    return text


def _use_problems(folders: list[Path] | None) -> list[Path] | None:
    if folders:
        before = map(str, problem_folders())
        os.environ[PROBLEM_FOLDERS] = os.pathsep.join(dict.fromkeys([*before, *map(os.path.abspath, folders)]))
    return folders


ProblemFolders: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--problems", metavar="FOLDER", callback=_use_problems, is_eager=True, help="A folder of problems of your own; may be repeated."
    ),
]
"""The option of verbs that know problems. Processes that they start find the folders in the environment."""
