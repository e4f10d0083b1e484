"""The adversarial corpus as the documentation shows it: its rules, and the candidates of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peerlane.report.tables import TextTable
from peerlane.words import counted

if TYPE_CHECKING:
    from peerlane.selftest.table import Corpus, Entry


def rules_table(corpus: Corpus) -> TextTable:
    """Returns a table with a line per rule: its page, and the rows that try or honour it."""
    table = TextTable(("rule", "cheats and bugs", "legitimate"))
    for rule, title in corpus.rules.items():
        rows = list(dict.fromkeys(entry.row for entry in corpus.entries if entry.rule == rule))
        bad = [row for row in rows if not row.startswith("A")]
        table.add(f"[{title}]({rule}.md)", ", ".join(bad), ", ".join(row for row in rows if row not in bad) or "-")
    return table


def rule_table(corpus: Corpus, rule: str) -> TextTable:
    """Returns a table with a line per candidate of a rule: what it does, the verdicts that are right for it, and why."""
    table = TextTable(("row", "what it does", "candidate", "on CPU", "on GPU", "why"))
    for entry in corpus.entries:
        if entry.rule == rule:
            table.add(
                entry.row,
                corpus.rows[entry.row],
                f"`{entry.file}`{_condition(entry)}",
                _either(entry.cpu),
                _either(entry.cuda),
                entry.why if entry.wins_at_most is None else f"{entry.why}; wins at most: {entry.wins_at_most}",
            )
    return table


def _condition(entry: Entry) -> str:
    parts = [f"isolation {entry.isolation}"] if entry.isolation != "L0" else []
    parts += [f"track {entry.track}"] if entry.track != "open" else []
    parts += [counted(entry.world_size, "rank")] if entry.world_size != 2 else []
    return f" ({', '.join(parts)})" if parts else ""


def _either(kinds: Sequence[str] | None) -> str:
    return " or ".join(f"`{kind}`" for kind in kinds) if kinds else "not judged"
