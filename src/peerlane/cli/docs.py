"""``peerlane docs``: what is generated in the documentation: the problems' pages, and the tables of committed results and of the corpus."""

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
    """Write or check the pages of the problems, the tables in the other pages, and the times and counts that `peerlane show` prints."""
    if write == check:
        raise UsageError("docs got " + ("both --write and --check" if write else "neither --write nor --check") + ": expected one of them")
    from peerlane import problems
    from peerlane.report import evidence, pages, sections

    if check:
        pages.must_exist(folder)
    root = folder.parent.parent
    measured = evidence.read_evidence(root)
    generated = pages.generate(problems.suite(), measured)
    documents = all((root / path).is_file() for path in sections.DOCUMENTS)  # a folder elsewhere has pages alone
    if write:
        changes = pages.write(folder, generated)
        if documents:
            changes += [*evidence.write(root, measured), *sections.write(root)]
        for change in changes:
            print(f"written: {change}")
        print(f"{len(generated)} pages in {folder}")
        return
    changes = pages.stale(folder, generated)
    if documents:
        changes += [*evidence.stale(root, measured), *sections.stale(root)]
    for change in changes:
        print(change)
    if changes:
        print("run `peerlane docs --write`")
        raise typer.Exit(ExitCode.CHECK_FAILED)
    print(f"{len(generated)} pages in {folder} match the code")
