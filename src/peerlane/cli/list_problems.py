"""``peerlane list``: the problems there are."""

from __future__ import annotations

from typing import Annotated

import typer

from peerlane.cli.options import ProblemFolders
from peerlane.cli.output import console, print_json
from peerlane.errors import UsageError


def list_problems(
    problems_folders: ProblemFolders = None,
    category: Annotated[str | None, typer.Option(help="Only problems whose category holds this text.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Only problems that run on so many nodes.")] = None,
    parallelism: Annotated[str | None, typer.Option(help="Only problems with a tag of parallelism that holds this text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the problems."""
    from peerlane import problems
    from peerlane.report.catalogue import problem_entry
    from peerlane.report.tables import TextTable

    suite = [
        problem
        for problem in problems.all_problems(nodes)
        if (category or "").lower() in problem.category.lower()
        and any((parallelism or "").lower() in tag.lower() for tag in problem.parallelism)
    ]
    if not suite:
        known = sorted({problem.category for problem in problems.all_problems(None)})
        tags = sorted({tag for problem in problems.all_problems(None) for tag in problem.parallelism})
        raise UsageError(f"no problem fits; categories: {', '.join(known)}; parallelism: {', '.join(tags)}")
    if as_json:
        print_json({"problems": [problem_entry(problem) for problem in suite]})
        return
    table = TextTable(("id", "name", "title", "category", "parallelism", "nodes", "ranks", "presets"), right={"id"})
    for problem in suite:
        table.add(
            str(problem.id),
            problem.slug,
            problem.title,
            problem.category,
            ", ".join(problem.parallelism),
            ", ".join(map(str, problem.nodes)),
            ", ".join(map(str, problem.world_sizes)),
            str(len(problem.presets) - len(problem.family("sweep"))) + (" + sweep" if problem.family("sweep") else ""),
        )
    out = console()
    out.print(table.rich())
    out.print("`peerlane show NUMBER` prints everything about one problem.")
