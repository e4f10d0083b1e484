"""Exit codes of all commands."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerlane.results.result import Result


class ExitCode(enum.IntEnum):
    """The exit codes of all commands."""

    OK = 0
    CHECK_FAILED = 1
    """A check found something wrong: stale pages, a machine that peerlane cannot work on, nothing that could be measured."""
    USAGE = 2
    """The request cannot be carried out; nothing was run."""
    NOT_CORRECT = 3
    """A candidate was not shown to be correct, or failed in a launch mode that was asked for. ``not_run`` counts, too."""
    HARNESS = 4
    """peerlane itself failed; says nothing about any candidate."""
    INTERRUPTED = 130


def exit_code(results: Sequence[Result], *, complete: bool = True) -> ExitCode:
    """Returns the exit code of an evaluation: a failure of the harness outweighs one of a candidate.

    ``complete``: no candidate was refused unread."""
    if any(result.verdict.kind == "harness_error" for result in results):
        return ExitCode.HARNESS
    good = all(result.correct and not any(speed.status == "failed" for speed in result.speed) for result in results)
    return ExitCode.OK if good and complete else ExitCode.NOT_CORRECT
