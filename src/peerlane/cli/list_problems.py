"""``peerlane list``: the problems there are."""

from __future__ import annotations

from typing import Annotated

import typer

from peerlane.cli._console import ProblemFolders, console, print_json


def list_problems(
    problems_folders: ProblemFolders = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the problems."""
    from peerlane import problems
    from peerlane.report.catalogue import problem_entry
    from peerlane.report.tables import TextTable

    suite = problems.all_problems()
    if as_json:
        print_json({"problems": [problem_entry(problem) for problem in suite]})
        return
    table = TextTable(("id", "name", "title", "category", "parallelism", "ranks", "presets"), right={"id"})
    for problem in suite:
        table.add(
            str(problem.id),
            problem.slug,
            problem.title,
            problem.category,
            ", ".join(problem.parallelism),
            ", ".join(map(str, problem.world_sizes)),
            str(len(problem.presets) - len(problem.family("sweep"))) + (" + sweep" if problem.family("sweep") else ""),
        )
    out = console()
    out.print(table.rich())
    out.print("`peerlane show NUMBER` prints everything about one problem.")
