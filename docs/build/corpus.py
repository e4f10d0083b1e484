"""The adversarial corpus as the documentation shows it: its rules, the candidates of each, and the outcomes of a run."""

from collections.abc import Callable, Sequence
from pathlib import Path

from docs.build.tables import table
from peerlane.common.words import counted
from peerlane.evaluate.selftest.table import Corpus, Entry, load
from peerlane.report.selftest import Judged, selftest_table, totals_lines


def rules_table(file: Path) -> str:
    """Returns a table with a line per rule of the corpus in ``file``: its page, and the rows that try or honour it."""
    corpus = load(file.parent)

    def rows(rule: str, honour: bool) -> str:
        named = dict.fromkeys(entry.row for entry in corpus.entries if entry.rule == rule)
        return ", ".join(row for row in named if row.startswith("A") == honour) or "-"

    columns: dict[str, Callable[[str], str]] = {
        "rule": lambda rule: f"[{corpus.rules[rule]}]({rule}.md)",
        "cheats and bugs": lambda rule: rows(rule, honour=False),
        "legitimate": lambda rule: rows(rule, honour=True),
    }
    return table(corpus.rules, columns, words=columns)


def rule_table(file: Path, rule: str) -> str:
    """Returns a table with a line per candidate of a rule of the corpus in ``file``: what it does, the verdicts that are right, and why."""
    corpus = load(file.parent)
    columns: dict[str, Callable[[Entry], str]] = {
        "row": lambda entry: entry.row,
        "what it does": lambda entry: corpus.rows[entry.row],
        "candidate": lambda entry: f"`{entry.file}`{_condition(entry)}",
        "on CPU": lambda entry: _either(entry.cpu),
        "on GPU": lambda entry: _either(entry.cuda),
        "why": lambda entry: entry.why if entry.wins_at_most is None else f"{entry.why}; wins at most: {entry.wins_at_most}",
    }
    return table([entry for entry in corpus.entries if entry.rule == rule], columns, words=columns)


def selftest_report(corpus: Corpus, judged: Judged) -> str:
    """Returns the table of a selftest, its totals, and where it was taken, as Markdown."""
    nodes = dict.fromkeys(
        f"Node: {outcome.node}; torch {outcome.torch}; isolation {outcome.isolation}; evaluator {outcome.evaluator_version}."
        for _, outcome in judged
    )
    return "\n".join([selftest_table(corpus, judged).markdown(), *(f"* {line}" for line in totals_lines(judged)), "", *nodes])


def _condition(entry: Entry) -> str:
    parts = [f"isolation {entry.isolation}"] if entry.isolation != "L0" else []
    parts += [f"track {entry.track}"] if entry.track != "open" else []
    parts += [counted(entry.world_size, "rank")] if entry.world_size != 2 else []
    return f" ({', '.join(parts)})" if parts else ""


def _either(kinds: Sequence[str] | None) -> str:
    return " or ".join(f"`{kind}`" for kind in kinds) if kinds else "not judged"
