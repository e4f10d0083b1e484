"""The table of what ``tests/gpu/train_examples.py`` stored: losses and times of a step on peerlane and on torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peerlane.common.words import counted
from peerlane.hardware.environment import node_class
from peerlane.report.tables import TextTable

SIDES = ("peerlane", "torch.distributed")


def training_report(path: Path) -> str:
    """Returns a table of the newest run of each example and model that trains: milliseconds a step, as median and quartiles, and losses."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if all("quartiles_ms" in row["sides"][side] for side in SIDES):
            rows[row["example"], row["model"]] = row
    if not rows:
        return "No run is recorded here.\n"
    times, losses = (f"{side}: ms a step" for side in SIDES), (f"{side}: loss" for side in SIDES)
    columns = ("example", "model", "steps", *times, *losses, "largest difference")
    table = TextTable(columns, right=columns[2:])
    for (example, model), row in sorted(rows.items()):
        ours, theirs = (row["sides"][side] for side in SIDES)
        difference = max(abs(x - y) / y for x, y in zip(ours["losses"], theirs["losses"], strict=True))
        table.add(
            example, model, str(row["steps"]), *(_time(side) for side in (ours, theirs)), *(_loss(side) for side in (ours, theirs)),
            f"{difference:.1e}",
        )  # fmt: skip
    return f"{table.markdown()}\nNode: {node_class(row['environment'])}; {counted(row['ranks'], 'rank')}.\n"


def _time(side: dict[str, Any]) -> str:
    low, median, high = side["quartiles_ms"]
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


def _loss(side: dict[str, Any]) -> str:
    return f"{side['losses'][0]:.3f} to {side['losses'][-1]:.3f}"
