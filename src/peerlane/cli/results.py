"""``peerlane results``: files of results as others read them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from peerlane.words import counted

results = typer.Typer(help="Work with files of results: bring old ones up to date, print their JSON Schema.", no_args_is_help=True)


@results.command()
def migrate(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A results.jsonl, selftest.jsonl or file of calibrations of version 1.")],
    out: Annotated[Path | None, typer.Option(metavar="NEW", help="File to write; by default OLD is replaced and kept as OLD.v1.")] = None,
) -> None:
    """Rewrite records of version 1 as version 2. Fields without a successor are kept under diagnostics.

    Example: peerlane results migrate peerlane-results/results.jsonl
    """
    from peerlane.selftest.migrate import BACKUP, migrate_file

    done = migrate_file(old, out)
    for line in done.left_out:
        print(f"{old}: {line}", file=sys.stderr)
    kept = f", {done.kept} of another version kept as they are" if done.kept else ""
    where = f"{old}; the old file is {old}{BACKUP}" if out is None else f"{out}"
    print(f"{counted(done.migrated, 'record')} migrated{kept}: {where}")


@results.command()
def schema() -> None:
    """Print the JSON Schema of a line of results.jsonl."""
    from peerlane.results.schema import SCHEMA_FILE

    print(SCHEMA_FILE.read_text(encoding="utf-8"), end="")
