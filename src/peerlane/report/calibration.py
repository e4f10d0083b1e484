"""The table of margins: per problem, preset and place, how near honest answers come to the limit and wrong ones to passing."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peerlane.evaluate.selftest.calibrate import Calibration
from peerlane.report.tables import TextTable

COLUMNS = ("problem", "preset", "W", "cases", "reference", "alternative solutions", "weakest wrong answer", "misses by")


def calibration_table(records: Iterable[Calibration]) -> TextTable:
    """Returns a table with a row per record: per problem, preset, variant and world size, the worst of its cases.

    Errors are in units of the allowed one: honest answers stay below 1, wrong ones above; "exact" where answers are compared bit for bit.
    """
    table = TextTable(COLUMNS, right={"W", "cases", "reference", "alternative solutions", "misses by"})
    for item in sorted(records, key=lambda item: (item.problem, item.world_size)):
        weakest = item.weakest
        table.add(
            f"{item.problem} {item.slug}",
            item.preset if item.variant == "default" else f"{item.preset} ({item.variant})",
            str(item.world_size),
            str(len(item.cases)),
            _ratio(item.reference.values()),
            _ratio(value for ratios in item.variants.values() for value in ratios.values()),
            "-" if weakest is None else weakest[0],
            "-" if weakest is None else "exact" if math.isinf(weakest[1].ratio) else f"{weakest[1].ratio:.3g}",
        )
    return table


def _ratio(values: Iterable[float]) -> str:
    largest = max(values, default=None)
    return "-" if largest is None else f"{largest:.2g}" if largest else "exact"
