"""Tables of a sweep: a candidate's collectives beside the references, by size."""

from __future__ import annotations

from collections.abc import Sequence

from peerlane.report.mechanisms import size_text
from peerlane.report.plots import sweep_bytes
from peerlane.report.tables import TextTable, microseconds
from peerlane.results.record import Mode
from peerlane.results.result import Result

MODES: tuple[Mode, ...] = ("graph", "eager")


def sweep_table(results: Sequence[Result], mode: Mode) -> TextTable:
    """Returns a table with a row per size, a column per problem: microseconds in this mode of its first candidate and, behind a stroke, of
    the reference next to that. Other candidates of the problem are left out.
    """
    first: dict[int, Result] = {}
    cells: dict[tuple[int, int], str] = {}
    for result in results:
        nbytes = sweep_bytes(result.preset)
        leader = first.setdefault(result.problem.id, result)
        if nbytes is None or leader.candidate.name != result.candidate.name:
            continue
        speed = result.speed_in(mode)
        shown = "-" if speed is None else f"{microseconds(speed.candidate_us)} / {microseconds(speed.reference_us)}"
        cells[nbytes, result.problem.id] = shown
    columns = [first[problem].problem.slug for problem in sorted(first)]
    table = TextTable(("size", *columns), right=("size", *columns))
    for nbytes in sorted({size for size, _ in cells}):
        table.add(size_text(nbytes), *(cells.get((nbytes, problem), "-") for problem in sorted(first)))
    return table
