"""Lines of code are those that are neither blank nor a comment nor a docstring."""

from __future__ import annotations

import re
from pathlib import Path

from peerlane.report.line_counts import Lines, lines_report, read_lines
from peerlane.solutions import files

SOURCE = '''"""A file
of two lines."""

from peerlane.device import communicator
from peerlane.device.host.declare import U32
from peerlane.device.products import gemm

SOURCE = r"""
#include <peerlane/rows.cuh>

// a comment
extern "C" __global__ void f() {  /* another */
}
"""


@decorated
def solution(x):
    """What it does."""
    # why
    text = """two
lines"""
    return (
        x
    )
'''


def test_host_and_device_lines_are_counted_apart(tmp_path: Path) -> None:
    file = tmp_path / "p001_sample.py"
    file.write_text(SOURCE)
    assert read_lines(file) == Lines(host=10, device=3, pieces=("collectives/communicator", "products/gemm", "rows.cuh"))


def test_every_solution_has_a_row() -> None:
    report = lines_report(next(iter(files().values())).parent)
    assert all(f"| {number} " in report for number in files()) and "| `rows.cuh` | 0 |" in report


def test_no_solution_uses_another_one() -> None:
    """Solutions are out of a candidate's reach, of theirs too; what they share belongs into the kit, or into families."""
    other = re.compile(r"peerlane\.solutions(?!\.families\.)")
    assert [number for number, path in files().items() if other.search(path.read_text())] == []
