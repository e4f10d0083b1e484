"""``peerlane report``: recorded results as a Markdown table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of results, one JSON object a line (results.jsonl).")],
) -> None:
    """Print recorded results as a Markdown table."""
    from peerlane.report.records import read_results
    from peerlane.report.tables import environment_lines, reasons, result_table

    results = [result for file in files for result in read_results(file)]
    print(result_table(results).markdown(), end="")
    for line in [*environment_lines(results), *reasons(results)]:
        print(f"\n{line}")
