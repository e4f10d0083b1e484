"""The page that compares the kit with ParallelKittens: its lines are counted, and its operators exist."""

from __future__ import annotations

import re
from pathlib import Path

from peerlane import ops
from peerlane.device.host.jit import INCLUDE_DIR

PAGE = Path(__file__).parents[2] / "docs" / "device" / "parallelkittens.md"


def lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if re.sub(r"//.*", "", line).strip())


def device_code(file: str) -> str:
    (source,) = (path for rooms in (INCLUDE_DIR / "peerlane", INCLUDE_DIR.parent) for path in rooms.glob(f"*/{file}"))
    return source.read_text()


def test_rows_have_the_lines_of_their_files_and_known_operators() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().split("## Item by item")[1].split("##")[0].splitlines()[4:]]
    rows = [row for row in rows if len(row) > 2]
    counted = 0
    for _, here, number, *operators in rows:
        files = re.findall(r"`(\w+\.cuh)`", here)
        if files:
            assert int(number) == sum(lines(device_code(file)) for file in files), (here, sum(lines(device_code(file)) for file in files))
            counted += 1
        assert all(hasattr(ops, name) for name in re.findall(r"`([a-z]\w+)`", "".join(operators))), operators
    assert counted > 15
