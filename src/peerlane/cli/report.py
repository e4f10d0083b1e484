"""``peerlane report``: recorded results as a table, as a plot, or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from peerlane.cli.output import console, print_error, print_markdown, print_table, read_result_files
from peerlane.common.words import counted
from peerlane.errors import UsageError


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER|FILE", help="Runs, folders of `peerlane eval --out`, their files, or one mechanisms.json."),
    ],
    noise: Annotated[
        bool, typer.Option("--noise", help="Only the reference against itself: the accuracy of the node and the protocol.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|FILE.pdf", help="Draw instead: times of a sweep against size, or bandwidths of the mechanisms."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write a page to publish instead; it opens without a network.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "peerlane results",
) -> None:
    """Print recorded results as a table for every class of machine, draw them, or write a page that others can open.

    On a terminal the table has the width of the screen; anywhere else it is Markdown.

    Example: peerlane report peerlane-results

    Example: peerlane report runs/model-a runs/model-b --html page.html
    """
    if html is not None:
        if noise or plot is not None:
            raise UsageError("--html got --noise or --plot as well: expected one of them; run report once with each")
        _page(files, html, title)
        return
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


def _page(files: list[Path], html: Path, title: str) -> None:
    from peerlane.publish.gather import gather
    from peerlane.publish.page import write_page

    gathered = gather(files)
    for note in [*gathered.notes, *gathered.skipped]:
        print_error(note)
    page = write_page(gathered, html, title)
    print(f"written: {html}")
    if page.beside:
        print(f"written: {counted(len(page.beside), 'page')} of candidates in {html.parent / page.folder}")


def _mechanisms(file: Path, plot: Path | None) -> None:
    from peerlane.report.mechanisms import mechanisms_report, read_mechanisms
    from peerlane.report.plots import mechanisms_plot, write_plot

    measured = read_mechanisms(file)
    if plot is None:
        print_markdown(mechanisms_report(measured))
    else:
        write_plot(mechanisms_plot(measured), plot)
        print(f"written: {plot}")


def _sweep(files: list[Path], plot: Path) -> None:
    from peerlane.report.plots import sweep_plot, write_plot

    write_plot(sweep_plot(read_result_files(files)), plot)
    print(f"written: {plot}")


def _results(files: list[Path], noise: bool) -> None:
    from peerlane.report.noise import noise_report
    from peerlane.report.tables import report_parts, results_report

    if not (results := read_result_files(files)):
        print(f"no results in {', '.join(map(str, files))}", file=sys.stderr)
    elif noise:
        print_markdown(noise_report(results))
    elif not (out := console()).is_terminal:
        print(results_report(results))
    else:
        for part in report_parts(results):
            if part.heading:
                out.print(part.heading)
            print_table(part.table)
            for note in part.notes:
                out.print(note)
