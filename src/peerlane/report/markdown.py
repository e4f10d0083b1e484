"""Pages of Markdown as a terminal can show them: tables as tables, charts as lists, links as their words."""

import re

from peerlane.report.tables import TextTable

_TABLE = re.compile(r"((?:^\|.*\|\n)+)", re.MULTILINE)
_CHART = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
_LABEL = re.compile(r'"(.*)"')
_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*\)")
_CELLS = re.compile(r"(?<!\\)\|")


def for_terminal(text: str) -> list[str | TextTable]:
    """Returns the parts of a page in their order: Markdown without tables, charts and links, and the tables."""
    text = _LINK.sub(r"\1", _CHART.sub(lambda chart: _steps(chart[1]), text if text.endswith("\n") else f"{text}\n"))
    parts = [_table(part) if part.startswith("|") else part for part in _TABLE.split(text)]
    return [part for part in parts if isinstance(part, TextTable) or part.strip()]


def _steps(chart: str) -> str:
    """Returns a chart, which is one chain of boxes, as a numbered list."""
    labels = [found[1] for line in chart.splitlines() if (found := _LABEL.search(line))]
    return "".join(f"{number}. {label.replace('<br/>', ', ')}\n" for number, label in enumerate(labels, 1))


def _table(text: str) -> TextTable:
    head, rule, *rows = [[cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in text.splitlines()]
    table = TextTable(head, right={name for name, dashes in zip(head, rule, strict=True) if dashes.endswith(":")})
    for row in rows:
        table.add(*(cell.replace("\\|", "|").replace("`", "") for cell in row))
    return table
