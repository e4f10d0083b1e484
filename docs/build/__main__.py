"""``peerlane docs``: the generated documentation: pages of problems, pictures, and tables of committed results and of the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.errors import UsageError


def docs(
    context: typer.Context,
    write: Annotated[bool, typer.Option("--write", help="Write the pages.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the pages do not match the code.")] = False,
    site: Annotated[
        Path | None, typer.Option("--site", metavar="FOLDER", help="Copy all pages into this folder, ready for a site generator.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the pages are.")] = Path("docs/problems"),
) -> None:
    """Write or check what is generated in the documentation: problems, command line, tables, and the times that `peerlane show` prints."""
    asked = [name for name, wanted in (("--write", write), ("--check", check), ("--site", site is not None)) if wanted]
    if len(asked) != 1:
        raise UsageError(f"docs got {' and '.join(asked) or 'nothing to do'}: expected one of --write, --check and --site")
    from peerlane import problems
    from peerlane.cli import command_reference
    from peerlane.report import architecture, evidence, figures, navigation, pages, sections, tutorial_figures
    from peerlane.report.site import stage

    if site is not None:
        pages.must_exist(folder)
        print(f"{stage(folder.parent.parent, site)} pages in {site}")
        return
    (pages.must_exist if check else pages.make)(folder)
    root, command = folder.parent.parent, context.find_root().command
    measured = evidence.read_evidence(root)
    generated = pages.generate(problems.suite(None), measured)
    documents = all((root / path).is_file() for path in sections.DOCUMENTS)  # a folder elsewhere has pages alone
    own = (
        (figures.figures(problems.suite(), measured, root), architecture.pictures(root), tutorial_figures.pictures(root))
        if documents
        else ()
    )
    pictures = {path: picture for group in own for path, picture in group.items()}
    if write:
        changes = pages.write(folder, generated)
        if documents:
            changes += [
                *evidence.write(root, measured),
                *sections.write(root),
                *command_reference.write(root, command),
                *figures.write(root, pictures),
                *navigation.write(root, problems.suite()),
            ]
        for change in changes:
            print(f"written: {change}")
        print(f"{len(generated)} files in {folder}")
        return
    changes = pages.stale(folder, generated)
    if documents:
        changes += [
            *evidence.stale(root, measured),
            *sections.stale(root),
            *command_reference.stale(root, command),
            *figures.stale(root, pictures),
            *navigation.stale(root, problems.suite()),
        ]
    for change in changes:
        print(change)
    if changes:
        print("run `peerlane docs --write`")
        raise typer.Exit(ExitCode.CHECK_FAILED)
    print(f"{len(generated)} files in {folder} match the code")
