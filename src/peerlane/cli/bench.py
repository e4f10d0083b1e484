"""``peerlane bench``: speed of the building blocks of kernels."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.options import one_of
from peerlane.cli.output import console, print_json, print_markdown, print_table
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.device.tools.mechanisms import Mechanisms
    from peerlane.report.mechanisms import MeasuredMechanisms


def bench(
    what: Annotated[str, typer.Argument(help="mechanisms: the ways to move data between GPUs.")],
    out: Annotated[Path, typer.Option(help="Folder that mechanisms.json is written to.")] = Path("peerlane-results"),
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg|FILE.pdf", help="Draw bandwidth against size.")] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show a stored mechanisms.json instead; needs no GPU.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure bandwidth by mechanism, size, number of blocks and peers, and latency of flags, packets and barriers. Needs 2 or more GPUs.

    Exit codes: 0; 2 where there are too few GPUs.
    """
    one_of(what, ("mechanisms",), "what to measure")
    if stored is None:
        measured = _measure(out)
    else:
        from peerlane.report.mechanisms import read_mechanisms

        measured = read_mechanisms(stored)
    if as_json:
        print_json(measured.to_json())
    elif stored is not None and plot is None:
        from peerlane.report.mechanisms import mechanisms_report

        print_markdown(mechanisms_report(measured))
    elif stored is None:
        print_mechanisms(measured.mechanisms)
        console(stderr=True).print(f"written to {out / 'mechanisms.json'}")
    if plot is not None:
        from peerlane.report.plots import mechanisms_plot, write_plot

        write_plot(mechanisms_plot(measured), plot)
        console(stderr=True).print(f"written to {plot}")


def _measure(out: Path) -> MeasuredMechanisms:
    """Measures, and keeps the measurement in a folder; raises UsageError."""
    from peerlane.hardware.topology import discover

    gpus = len(discover().gpus)
    if gpus < 2:
        raise UsageError(f"bench mechanisms needs 2 or more GPUs; this machine has {gpus}: run it on a node with NVLink")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out}: {error.strerror}; name one that can be written with --out") from None

    from peerlane.common.files import write_atomically
    from peerlane.device.tools.mechanisms import measure_mechanisms
    from peerlane.hardware.environment import record
    from peerlane.report.mechanisms import FILE, MeasuredMechanisms

    mechanisms = measure_mechanisms()
    measured = MeasuredMechanisms(record(discover()), datetime.now(UTC).replace(microsecond=0), mechanisms)
    write_atomically(out / FILE, json.dumps(measured.to_json(), indent=1).encode())
    return measured


def print_mechanisms(measured: Mechanisms) -> None:
    """Prints tables for a terminal: bandwidths by number of peers, of all GPUs at once, and latencies."""
    from peerlane.report.mechanisms import bandwidth_table, latency_table, together_table

    screen = console()
    for peers in sorted({row.peers for row in measured.bandwidths}):
        screen.print(f"GPU 0 and {peers} peer{'s' if peers > 1 else ''}, 10^9 bytes/s, medians:")
        print_table(bandwidth_table(measured.bandwidths, peers))
    screen.print(f"All {measured.gpus} GPUs at once, both directions of every link in use, 10^9 bytes/s a direction:")
    print_table(together_table(measured.bandwidths))
    screen.print("A flag or packet there and back, and a barrier of all GPUs:")
    print_table(latency_table(measured.latencies))
