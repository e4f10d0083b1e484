"""``peerlane report``: recorded results as a Markdown table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of results, one JSON object a line (results.jsonl).")],
    noise: Annotated[
        bool, typer.Option("--noise", help="Only the reference against itself: the accuracy of the node and the protocol.")
    ] = False,
) -> None:
    """Print recorded results as a Markdown table."""
    from peerlane.report.noise import acceptance_lines, noise_table
    from peerlane.report.records import read_results
    from peerlane.report.tables import environment_lines, mechanism_lines, reasons, result_table

    results = [result for file in files for result in read_results(file)]
    table = noise_table(results) if noise else result_table(results)
    print(table.markdown(), end="")
    told = acceptance_lines(results) if noise else mechanism_lines(results)
    for line in [*told, *environment_lines(results), *reasons(results)]:
        print(f"\n{line}")
