"""The measurements of ``peerlane bench mechanisms``: reading their file, and the tables made from it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from peerlane.device.tools.mechanisms import Bandwidth, Latency, Mechanisms, fastest
from peerlane.errors import UsageError
from peerlane.hardware.ceilings import Measurement
from peerlane.hardware.environment import node_class
from peerlane.report.tables import TextTable

FILE = "mechanisms.json"
NEARLY = 0.95
"""The share of a mechanism's highest rate from which on more blocks are not worth their SMs."""


@dataclass(frozen=True)
class MeasuredMechanisms:
    """A measurement, where it was taken (see :func:`peerlane.hardware.environment.record`) and when it ended."""

    environment: Mapping[str, Any]
    finished_at: datetime
    mechanisms: Mechanisms

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of the file."""
        return {"environment": dict(self.environment), "finished_at": self.finished_at.isoformat(), **asdict(self.mechanisms)}


def read_mechanisms(path: Path) -> MeasuredMechanisms:
    """Reads the measurement in a file; raises UsageError if there is none."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}: expected what `peerlane bench mechanisms` writes")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        bandwidths = tuple(Bandwidth(**row) for row in document["bandwidths"])
        latencies = tuple(Latency(**row) for row in document["latencies"])
        when = datetime.fromisoformat(document["finished_at"])
        return MeasuredMechanisms(document["environment"], when, Mechanisms(document["gpus"], bandwidths, latencies))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a measurement of mechanisms ({error!r}): expected what `peerlane bench mechanisms` writes"
        ) from None


def as_ceilings(measured: Mechanisms) -> dict[str, Measurement]:
    """Returns the bandwidth of each mechanism between two GPUs and the latency of messages as figures of
    :class:`peerlane.hardware.ceilings.Ceilings`. The lowest and the highest of the few samples stand for their percentiles.
    """
    figures: dict[str, Measurement] = {}
    for row in measured.bandwidths:
        name = f"nvlink_{row.mechanism}_gbps"
        if row.peers == row.movers == 1 and (name not in figures or row.gbps > figures[name].median):
            figures[name] = Measurement(row.gbps, row.lowest_gbps, row.highest_gbps, row.n)
    return figures | {f"{row.what}_round_us": Measurement(row.us, row.lowest_us, row.highest_us, row.n) for row in measured.latencies}


def size_text(nbytes: int) -> str:
    """Returns a size as ``64 KiB`` or ``240 MiB``, to three digits: a size that had to be cut into equal parts keeps its name."""
    mebibytes = float(f"{nbytes / 2**20:.3g}")
    return f"{mebibytes:.4g} MiB" if mebibytes >= 1 else f"{float(f'{nbytes / 2**10:.3g}'):.4g} KiB"


def bandwidth_table(bandwidths: Iterable[Bandwidth], peers: int) -> TextTable:
    """Returns the rates of GPU 0 alone to so many peers: 10^9 bytes/s by size, a row per mechanism and block count."""
    rows = [row for row in bandwidths if row.peers == peers and row.movers == 1]
    sizes = sorted({row.nbytes for row in rows})
    table = TextTable(("mechanism", "blocks", *map(size_text, sizes)), right={"blocks", *map(size_text, sizes)})
    mechanisms = list(dict.fromkeys(row.mechanism for row in rows))
    for mechanism, blocks in sorted({(row.mechanism, row.blocks) for row in rows}, key=lambda pair: (mechanisms.index(pair[0]), pair[1])):
        by_size = {row.nbytes: row for row in rows if (row.mechanism, row.blocks) == (mechanism, blocks)}
        table.add(mechanism, str(blocks or "-"), *(f"{by_size[size].gbps:.0f}" if size in by_size else "-" for size in sizes))
    return table


def together_table(bandwidths: Iterable[Bandwidth]) -> TextTable:
    """Returns the rates of all GPUs at once: 10^9 bytes/s that each moves."""
    columns = ("mechanism", "blocks", "size", "each GPU", "lowest", "highest")
    table = TextTable(columns, right=columns[1:])
    for row in bandwidths:
        if row.movers > 1:
            rates = (f"{rate:.0f}" for rate in (row.gbps, row.lowest_gbps, row.highest_gbps))
            table.add(row.mechanism, str(row.blocks or "-"), size_text(row.nbytes), *rates)
    return table


def latency_table(latencies: Iterable[Latency]) -> TextTable:
    """Returns a table of microseconds per round."""
    columns = ("round", "us", "lowest", "highest", "n")
    table = TextTable(columns, right=columns[1:])
    for row in latencies:
        table.add(row.what, *(f"{value:.2f}" for value in (row.us, row.lowest_us, row.highest_us)), str(row.n))
    return table


def choice_table(measured: Mechanisms) -> TextTable:
    """Returns the table to choose a mechanism by: a row per mechanism, GPU 0 and as many peers as there are.

    Rates by size are those of the fastest block count; "blocks" are the fewest that reach :data:`NEARLY` of the rate at the largest size.
    """
    alone = [row for row in measured.bandwidths if row.peers == measured.gpus - 1 and row.movers == 1]
    sizes = sorted({row.nbytes for row in alone})
    best = {(row.mechanism, row.nbytes): row for row in fastest(alone)}
    together = {row.mechanism: row for row in measured.bandwidths if row.movers > 1}
    columns = (*map(size_text, sizes), "lowest to highest", "blocks", "all GPUs at once")
    table = TextTable(("mechanism", *columns), right=columns)
    for mechanism in dict.fromkeys(row.mechanism for row in alone):
        top = best[mechanism, sizes[-1]]
        near = [row.blocks for row in alone if (row.mechanism, row.nbytes) == (mechanism, sizes[-1]) and row.gbps >= NEARLY * top.gbps]
        table.add(
            mechanism.replace("_", " "),
            *(f"{best[mechanism, size].gbps:.0f}" if (mechanism, size) in best else "-" for size in sizes),
            f"{top.lowest_gbps:.0f} to {top.highest_gbps:.0f}",
            str(min(near) or "-"),
            f"{together[mechanism].gbps:.0f}" if mechanism in together else "-",
        )
    return table


def mechanisms_report(measured: MeasuredMechanisms) -> str:
    """Returns the measurement as Markdown, for an engineer who has to choose a mechanism."""
    mechanisms = measured.mechanisms
    peers = f"{mechanisms.gpus - 1} peer{'s' if mechanisms.gpus > 2 else ''}"
    return "\n".join(
        [
            f"GPU 0 and {peers}, 10^9 bytes/s of payload, by size. The spread is that of the largest size. Blocks: the fewest that reach "
            f"{NEARLY:.0%} of its rate. The last column is what each GPU moves of it while all others do the same.\n",
            choice_table(mechanisms).markdown(),
            "A flag there and back, a packet there and back, and a barrier of all GPUs:\n",
            latency_table(mechanisms.latencies).markdown(),
            f"{node_class(measured.environment)}; {measured.finished_at:%Y-%m-%d}; {mechanisms.bandwidths[0].n} samples each, medians.",
        ]
    )
