"""``peerlane report``: recorded results as a Markdown table, or as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peerlane.errors import UsageError


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files of results, one JSON object a line (results.jsonl), or one mechanisms.json."),
    ],
    noise: Annotated[
        bool, typer.Option("--noise", help="Only the reference against itself: the accuracy of the node and the protocol.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw instead: times of a sweep against size, or bandwidths of the mechanisms."),
    ] = None,
) -> None:
    """Print recorded results as a Markdown table, or draw them."""
    from peerlane.report import mechanisms

    if any(file.name == mechanisms.FILE for file in files):
        if len(files) > 1 or noise:
            raise UsageError(f"{mechanisms.FILE} is reported alone and without --noise; got {' '.join(map(str, files))}: run it by itself")
        _mechanisms(files[0], plot)
    elif plot is not None and noise:
        raise UsageError("--noise got --plot as well: expected one of them, for the accuracy is a table; run report once with each")
    elif plot is not None:
        _sweep(files, plot)
    else:
        _results(files, noise)


def _mechanisms(file: Path, plot: Path | None) -> None:
    from peerlane.report.mechanisms import mechanisms_report, read_mechanisms
    from peerlane.report.plots import mechanisms_plot, write_svg

    measured = read_mechanisms(file)
    if plot is None:
        print(mechanisms_report(measured))
    else:
        write_svg(mechanisms_plot(measured), plot)
        print(f"written: {plot}")


def _sweep(files: list[Path], plot: Path) -> None:
    from peerlane.evaluate.results.reader import read_results
    from peerlane.report.plots import sweep_plot, write_svg

    write_svg(sweep_plot(result for file in files for result in read_results(file)), plot)
    print(f"written: {plot}")


def _results(files: list[Path], noise: bool) -> None:
    from peerlane.evaluate.results.reader import read_results
    from peerlane.report.noise import acceptance_lines, noise_table
    from peerlane.report.tables import environment_lines, mechanism_lines, reasons, result_table

    results = [result for file in files for result in read_results(file)]
    table = noise_table(results) if noise else result_table(results)
    print(table.markdown(), end="")
    told = acceptance_lines(results) if noise else mechanism_lines(results)
    for line in [*told, *environment_lines(results), *reasons(results)]:
        print(f"\n{line}")
