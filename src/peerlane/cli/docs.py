"""``peerlane docs``: the problems' documentation pages, generated from the problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peerlane.cli._console import ExitCode
from peerlane.errors import UsageError


def docs(
    write: Annotated[bool, typer.Option("--write", help="Write the pages.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the pages do not match the code.")] = False,
    folder: Annotated[Path, typer.Option(help="Where the pages are.")] = Path("docs/problems"),
) -> None:
    """Write or check the documentation pages of the problems."""
    if write == check:
        raise UsageError("docs got " + ("both --write and --check" if write else "neither --write nor --check") + ": expected one of them")
    from peerlane import problems
    from peerlane.report import pages

    generated = pages.generate(problems.all_problems())
    if write:
        for change in pages.write(folder, generated):
            print(f"written: {change}")
        print(f"{len(generated)} pages in {folder}")
        return
    changes = pages.stale(folder, generated)
    for change in changes:
        print(change)
    if changes:
        print("run `peerlane docs --write`")
        raise typer.Exit(ExitCode.CHECK_FAILED)
    print(f"{len(generated)} pages in {folder} match the code")
