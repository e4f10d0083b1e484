"""The tables of a selftest, row by row with its totals, and of the margins that a calibration found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from peerlane.evaluate.selftest.outcome import Outcome, objection, totals
from peerlane.report.tables import TextTable

if TYPE_CHECKING:
    from peerlane.evaluate.selftest.calibrate import Calibration
    from peerlane.evaluate.selftest.table import Corpus, Entry

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


def _either(kinds: Sequence[str]) -> str:
    return " or ".join(kinds) or "-"


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
