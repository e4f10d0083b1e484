"""``peerlane report``, ``noise``, ``plot`` and ``page``: recorded results as a table, as a picture, and as a page for others."""

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from peerlane.cli.output import console, print_error, print_markdown, print_table, read_result_files
from peerlane.common.words import counted
from peerlane.errors import UsageError

Files: TypeAlias = Annotated[
    list[Path], typer.Argument(metavar="FOLDER|FILE", help="Runs, folders of `peerlane eval --out`, or their files.")
]


def report(
    files: Files,
    noise: Annotated[bool, typer.Option("--noise", hidden=True)] = False,
    plot: Annotated[Path | None, typer.Option(hidden=True)] = None,
    html: Annotated[Path | None, typer.Option(hidden=True)] = None,
    title: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print recorded results as a table for every class of machine.

    On a terminal the table has the width of the screen; anywhere else it is Markdown.
    """
    named, is_measurement = " ".join(map(str, files)), any(file.name == "mechanisms.json" for file in files)
    if html is not None or title is not None:
        raise UsageError(f"report prints a table only: expected `peerlane page {named} --out {html or 'PAGE.html'}` for a page")
    if is_measurement:
        drawn = "" if plot is None else f" --plot {plot}"
        raise UsageError(f"report prints results only: expected `peerlane bench mechanisms --from {named}{drawn}` for a measurement")
    if plot is not None:
        raise UsageError(f"report prints a table only: expected `peerlane plot {named} --out {plot}` for a picture")
    if noise:
        raise UsageError(f"report prints a table only: expected `peerlane noise {named}` for the accuracy of the node")
    from peerlane.report.tables import report_parts, results_report

    if not (results := read_result_files(files)):
        print(f"no results in {', '.join(map(str, files))}", file=sys.stderr)
    elif not (out := console()).is_terminal:
        print(results_report(results))
    else:
        for part in report_parts(results):
            if part.heading:
                out.print(part.heading)
            print_table(part.table)
            for note in part.notes:
                out.print(note)


def noise(files: Files) -> None:
    """Print how far the reference is from itself: the accuracy of the node and the protocol.

    It reads results of `peerlane eval reference`; others are left out.
    """
    from peerlane.report.noise import noise_report

    print_markdown(noise_report(read_result_files(files)))


def plot(files: Files, out: Annotated[Path, typer.Option(metavar="FILE.svg|FILE.pdf", help="The picture.")] = Path("sweep.svg")) -> None:
    """Draw times of a sweep against size, from results of `peerlane eval --preset sweep`."""
    from peerlane.report.plots import sweep_plot, write_plot

    write_plot(sweep_plot(read_result_files(files)), out)
    print(f"written: {out}")


def page(
    files: Annotated[
        list[Path], typer.Argument(metavar="FOLDER|FILE", help="Runs, bundles, folders of `peerlane eval --out`, or their files.")
    ],
    out: Annotated[Path, typer.Option(metavar="PAGE.html", help="The page; it opens without a network.")] = Path("page.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "peerlane results",
) -> None:
    """Write a page that others can open: leaderboards, plots and every candidate."""
    from peerlane.publish.gather import gather
    from peerlane.publish.page import write_page

    gathered = gather(files)
    for note in [*gathered.notes, *gathered.skipped]:
        print_error(note)
    written = write_page(gathered, out, title)
    print(f"written: {out}")
    if written.beside:
        print(f"written: {counted(len(written.beside), 'page')} of candidates in {out.parent / written.folder}")
