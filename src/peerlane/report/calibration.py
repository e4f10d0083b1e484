"""The table of margins: per problem, preset and place, how near honest answers come to the limit and wrong ones to passing."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peerlane.evaluate.calibrate import Calibration
from peerlane.report.tables import TextTable

COLUMNS = ("problem", "preset", "device", "W", "cases", "reference", "honest variants", "weakest wrong answer", "misses by")


def calibration_table(records: Iterable[Calibration]) -> TextTable:
    """One row per problem, preset, device and world size, the worst of its cases.

    Errors are in units of the allowed one: honest answers stay below 1, wrong ones above; "exact" where answers are compared bit for bit.
    """
    groups: dict[tuple[str, ...], list[Calibration]] = {}
    for item in sorted(records, key=lambda item: (item.problem, item.device, item.world_size)):
        preset = item.preset if item.variant == "default" else f"{item.preset} ({item.variant})"
        groups.setdefault((f"{item.problem} {item.slug}", preset, item.device, str(item.world_size)), []).append(item)
    table = TextTable(COLUMNS, right={"W", "cases", "reference", "honest variants", "misses by"})
    for head, items in groups.items():
        weakest = [found for item in items if (found := item.margins.weakest()) is not None]
        name, ratio = min(weakest, key=lambda found: found[1]) if weakest else ("-", None)
        table.add(
            *head,
            str(len(items)),
            _ratio([value for item in items for value in item.reference.values()]),
            _ratio([value for item in items for ratios in item.variants.values() for value in ratios.values()]),
            name,
            "-" if ratio is None else "exact" if math.isinf(ratio) else f"{ratio:.3g}",
        )
    return table


def _ratio(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{max(values):.2g}" if max(values) else "exact"
