"""``peerlane list``: the problems there are."""

from typing import Annotated, Any

import typer

from peerlane.cli.options import ProblemFolders
from peerlane.cli.output import console, print_json, print_table
from peerlane.errors import UsageError


def list_problems(
    problems_folders: ProblemFolders = None,
    category: Annotated[str | None, typer.Option(help="Only problems whose category holds this text.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Only problems that run on so many nodes.")] = None,
    parallelism: Annotated[str | None, typer.Option(help="Only problems with a tag of parallelism that holds this text.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Titles, tags of parallelism, numbers of ranks and presets too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the problems."""
    from peerlane.common.problem_files import index_entries
    from peerlane.report.tables import TextTable

    every = index_entries() or _entries_of_modules()
    chosen = [
        entry
        for entry in every
        if nodes in (None, *entry["nodes"])
        and (category or "").lower() in entry["category"].lower()
        and any((parallelism or "").lower() in tag.lower() for tag in entry["parallelism"])
    ]
    if not chosen:
        known, tags = {entry["category"] for entry in every}, {tag for entry in every for tag in entry["parallelism"]}
        raise UsageError(f"no problem fits; categories: {', '.join(sorted(known))}; parallelism: {', '.join(sorted(tags))}")
    if as_json:
        print_json({"problems": chosen})
        return
    columns = ("id", "name", "category", *(("title", "parallelism", "nodes", "ranks", "presets") if long else ()))
    table = TextTable(columns, right={"id"}, spare=("presets", "ranks", "nodes", "parallelism", "category") if long else ())
    for entry in chosen:
        presets = [name for name in entry["presets"] if not name.startswith("sweep_")]
        long_cells = (
            entry["title"],
            *(", ".join(map(str, entry[name])) for name in ("parallelism", "nodes", "world_sizes")),
            str(len(presets)) + (" + sweep" if len(presets) < len(entry["presets"]) else ""),
        )
        table.add(str(entry["id"]), entry["slug"], entry["category"], *(long_cells if long else ()))
    print_table(table)
    console().print(
        "`peerlane show NUMBER` prints everything about one problem" + ("." if long else ", `peerlane list --long` the titles.")
    )


def _entries_of_modules() -> list[dict[str, Any]]:
    """Returns the entries of all problems, imported one by one, which takes seconds."""
    from peerlane.problems import all_problems
    from peerlane.report.catalogue import problem_entry

    return [problem_entry(problem) for problem in all_problems(None)]
