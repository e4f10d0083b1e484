"""Faults of one-sided communication as the literature names them: those that the page says are found are found, and no repair is."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from peerlane.emulator import Report, Scenario, check

SOURCE = Path(__file__).with_name("patterns.cu")
PAGE = (Path(__file__).parents[2] / "docs" / "device" / "patterns.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| (\d+) of 40 \|", PAGE, re.MULTILINE)
RANKS, SCHEDULES = 3, 40
THREADS = {"one_thread_signals": 64}
"""Threads of a block, for the patterns that need more than one."""


def run(pattern: str, broken: int) -> Report:
    scenario = Scenario(pattern, SOURCE, RANKS, {"BROKEN": broken})
    arena = scenario.arena(8192)
    data, flags = arena.take(128), arena.take(16 * 128)
    out = scenario.buffer("out", [torch.zeros(4, dtype=torch.int32)] * RANKS)
    for epoch in (1, 2):
        arguments = [arena, ctypes.c_uint64(data), ctypes.c_uint64(flags), out, ctypes.c_uint32(epoch)]
        scenario.launch(pattern, 1, THREADS.get(pattern, 1), arguments, shared_bytes=128)
    return check(scenario, schedules=SCHEDULES)


def test_every_pattern_has_its_row() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(re.findall(r"PATTERN\((\w+)\) \{", SOURCE.read_text())) and len(ROWS) >= 20


@pytest.mark.parametrize(("pattern", "found", "schedules"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_pattern_is_found_as_the_page_says_its_repair_is_not(pattern: str, found: str, schedules: str) -> None:
    report = run(pattern, broken=1)
    kinds = sorted({finding.kind for finding in report.findings})
    assert (", ".join(f"`{kind}`" for kind in kinds) or "nothing", report.caught) == (found.strip(), int(schedules)), str(report)
    repaired = run(pattern, broken=0)
    assert repaired.clean, str(repaired)
