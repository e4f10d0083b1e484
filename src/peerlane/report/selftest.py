"""The table of a selftest, row by row, and the corpus as the documentation shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from peerlane.report.tables import TextTable
from peerlane.selftest.outcome import Outcome, objection, totals

if TYPE_CHECKING:
    from peerlane.selftest.table import Corpus, Entry

Judged = Sequence[tuple["Entry", Outcome]]


def selftest_table(corpus: Corpus, judged: Judged) -> TextTable:
    """Returns a table with a line per candidate, in the table's order: the verdicts it got and how often, those that are right, whether all
    are."""
    table = TextTable(("row", "candidate", "W", "verdicts", "expected", "ok"), right={"W"})
    for entry, mine in _by_candidate(corpus, judged):
        table.add(
            entry.row,
            entry.file,
            str(mine[0].world_size),
            _counted(outcome.verdict for outcome in mine),
            _either(entry.accepted(mine[0].device)),
            "yes" if all(objection(entry, outcome) is None for outcome in mine) else "NO",
        )
    return table


def honest_table(corpus: Corpus, judged: Judged) -> TextTable:
    """Returns a table with a line per honest candidate: the verdicts that it got and how often, and the mean wall time of one."""
    table = TextTable(("row", "candidate", "W", "verdicts", "s"), right={"W", "s"})
    for entry, mine in _by_candidate(corpus, judged):
        seconds = sum(outcome.seconds for outcome in mine) / len(mine)
        table.add(entry.row, entry.file, str(mine[0].world_size), _counted(map(_class, mine)), f"{seconds:.1f}")
    return table


def accusations(judged: Judged) -> list[str]:
    """Returns a line for every outcome of an honest candidate that is not ``correct``, false verdicts last."""
    said = [(outcome.honest_class == "false", outcome) for _, outcome in judged if outcome.honest_class != "correct"]
    return [
        f"{outcome.file}, W={outcome.world_size}, {outcome.device}: {_class(outcome)}: {outcome.reason}"
        for _, outcome in sorted(said, key=lambda item: item[0])
    ]


def honest_totals(judged: Judged) -> dict[str, int]:
    """Counts the outcomes of honest candidates by what they say of them, false verdicts last."""
    counts = Counter(outcome.honest_class for _, outcome in judged)
    return {kind: counts[kind] for kind in ("correct", "not_run", "overloaded", "harness_error", "false")}


def _class(outcome: Outcome) -> str:
    """Returns the verdict, with what it says of an honest candidate."""
    return outcome.verdict if outcome.verdict == outcome.honest_class else f"{outcome.verdict} ({outcome.honest_class})"


def _by_candidate(corpus: Corpus, judged: Judged) -> Iterator[tuple[Entry, list[Outcome]]]:
    """Yields entries in the table's order with their outcomes, once for each number of ranks and device."""
    outcomes_of: dict[str, dict[tuple[int, str], list[Outcome]]] = {}
    for entry, outcome in judged:
        outcomes_of.setdefault(entry.file, {}).setdefault((outcome.world_size, outcome.device), []).append(outcome)
    for entry in corpus.entries:
        for _, mine in sorted(outcomes_of.get(entry.file, {}).items()):
            yield entry, mine


def _counted(kinds: Iterable[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in Counter(kinds).most_common())


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


def node_lines(judged: Judged) -> list[str]:
    """Returns lines that say where and how the outcomes were taken."""
    return list(
        dict.fromkeys(
            f"Node: {outcome.node}; torch {outcome.torch}; isolation {outcome.isolation}; evaluator {outcome.evaluator_version}."
            for _, outcome in judged
        )
    )


def selftest_report(corpus: Corpus, judged: Judged) -> str:
    """Returns the table, its totals, and where it was taken, as Markdown."""
    parts = [selftest_table(corpus, judged).markdown(), *(f"* {line}" for line in totals_lines(judged)), ""]
    return "\n".join([*parts, *node_lines(judged)])


def _either(kinds: Sequence[str]) -> str:
    return " or ".join(kinds) or "-"
