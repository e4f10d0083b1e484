"""The table of a selftest, row by row, and its totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peerlane.evaluate.selftest.outcome import Outcome, objection, totals
from peerlane.report.tables import TextTable

if TYPE_CHECKING:
    from peerlane.evaluate.selftest.table import Corpus, Entry

Judged = Sequence[tuple["Entry", Outcome]]


def selftest_table(corpus: Corpus, judged: Judged) -> TextTable:
    """Returns a table with a line per candidate, in the table's order: the verdicts it got and how often, those that are right, whether all
    are."""
    table = TextTable(("row", "candidate", "W", "verdicts", "expected", "ok"), right={"W"})
    outcomes_of: dict[str, dict[int, list[Outcome]]] = {}
    for entry, outcome in judged:
        outcomes_of.setdefault(entry.file, {}).setdefault(outcome.world_size, []).append(outcome)
    for entry in corpus.entries:
        for world_size, mine in sorted(outcomes_of.get(entry.file, {}).items()):
            counts = Counter(outcome.verdict for outcome in mine)
            table.add(
                entry.row,
                entry.file,
                str(world_size),
                ", ".join(f"{kind} {count}" for kind, count in counts.most_common()),
                _either(entry.accepted(mine[0].device)),
                "yes" if all(objection(entry, outcome) is None for outcome in mine) else "NO",
            )
    return table


def totals_lines(judged: Judged) -> list[str]:
    """Returns the totals of a selftest in sentences."""
    counts = totals(judged)
    return [
        f"Cheats and bugs judged as expected: {counts['bad_ok']}/{counts['bad']}.",
        f"Legitimate candidates accepted: {counts['good_ok']}/{counts['good']}.",
    ]


def objections(judged: Judged) -> list[str]:
    """Returns a line for every outcome that is not what the table promises."""
    lines = []
    for entry, outcome in judged:
        if (why := objection(entry, outcome)) is not None:
            before = f", judged after {outcome.after}" if entry.kind == "legitimate" and outcome.after else ""
            lines.append(f"{entry.row} {entry.file}, W={outcome.world_size}: {why}{before}")
    return lines


def _either(kinds: Sequence[str]) -> str:
    return " or ".join(kinds) or "-"
