"""``peerlane bench``: how fast the parts are that kernels are made of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli._console import console, one_of, print_json
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.device.mechanisms import Mechanisms


def bench(
    what: Annotated[str, typer.Argument(help="mechanisms: the ways to move data between GPUs.")],
    out: Annotated[Path, typer.Option(help="Folder that mechanisms.json is written to.")] = Path("peerlane-results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure bandwidth by mechanism, size, number of blocks and peers, and latency of flags, packets and barriers. Needs 2 or more GPUs.

    Exit codes: 0; 2 where there are too few GPUs.
    """
    one_of(what, ("mechanisms",), "what to measure")

    from peerlane.hardware.topology import discover

    gpus = len(discover().gpus)
    if gpus < 2:
        raise UsageError(f"bench mechanisms needs 2 or more GPUs; this machine has {gpus}: run it on a node with NVLink")

    from peerlane.device.jit import write_atomically
    from peerlane.device.mechanisms import measure_mechanisms
    from peerlane.hardware.environment import record

    measured = measure_mechanisms()
    answer = {"environment": record(discover()), **asdict(measured)}
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "mechanisms.json", json.dumps(answer, indent=1).encode())
    if as_json:
        print_json(answer)
    else:
        print_mechanisms(measured)
        console(stderr=True).print(f"written to {out / 'mechanisms.json'}")


def print_mechanisms(measured: Mechanisms) -> None:
    """Two tables: bandwidths, a row per mechanism and block count, a column per size; and latencies."""
    from peerlane.report.tables import TextTable

    screen = console()
    alone = [row for row in measured.bandwidths if row.movers == 1]
    for peers in sorted({row.peers for row in alone}):
        rows = [row for row in alone if row.peers == peers]
        columns = sorted({row.nbytes for row in rows})
        table = TextTable(("mechanism", "blocks", *(f"{size / 2**20:.4g} MiB" for size in columns)))
        for mechanism, blocks in dict.fromkeys((row.mechanism, row.blocks) for row in rows):
            found = {row.nbytes: row for row in rows if (row.mechanism, row.blocks) == (mechanism, blocks)}
            table.add(mechanism, str(blocks or "-"), *(f"{found[size].gbps:.0f}" if size in found else "-" for size in columns))
        screen.print(f"GPU 0 and {peers} peer{'s' if peers > 1 else ''}, 10^9 bytes/s, medians:")
        screen.print(table.rich())
    together = TextTable(("mechanism", "blocks", "MiB", "each GPU", "lowest", "highest"))
    for row in measured.bandwidths:
        if row.movers > 1:
            rates = (f"{value:.0f}" for value in (row.gbps, row.lowest_gbps, row.highest_gbps))
            together.add(row.mechanism, str(row.blocks or "-"), f"{row.nbytes / 2**20:.4g}", *rates)
    screen.print(f"All {measured.gpus} GPUs at once, both directions of every link in use, 10^9 bytes/s a direction:")
    screen.print(together.rich())
    latencies = TextTable(("round", "us", "lowest", "highest", "n"))
    for latency in measured.latencies:
        latencies.add(latency.what, *(f"{value:.2f}" for value in (latency.us, latency.lowest_us, latency.highest_us)), str(latency.n))
    screen.print("A flag or packet there and back, and a barrier of all GPUs:")
    screen.print(latencies.rich())
