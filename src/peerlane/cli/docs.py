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
    """Write or check the pages of the problems, and the tables of results and of the adversarial corpus in the other pages."""
    if write == check:
        raise UsageError("docs got " + ("both --write and --check" if write else "neither --write nor --check") + ": expected one of them")
    from peerlane import problems
    from peerlane.report import pages, sections
    from peerlane.report.evidence import read_evidence

    if check:
        pages.must_exist(folder)
    root = folder.parent.parent
    generated = pages.generate(problems.suite(), read_evidence(root))
    documents = all((root / path).is_file() for path in sections.DOCUMENTS)  # a folder elsewhere has pages alone
    if write:
        for change in [*pages.write(folder, generated), *(sections.write(root) if documents else [])]:
            print(f"written: {change}")
        print(f"{len(generated)} pages in {folder}")
        return
    changes = [*pages.stale(folder, generated), *(sections.stale(root) if documents else [])]
    for change in changes:
        print(change)
    if changes:
        print("run `peerlane docs --write`")
        raise typer.Exit(ExitCode.CHECK_FAILED)
    print(f"{len(generated)} pages in {folder} match the code")
