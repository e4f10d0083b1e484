"""The problems in the navigation of the site: the lines of ``mkdocs.yml`` between two comments."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from docs.build.pages import page_name
from peerlane.errors import UsageError
from peerlane.problems import Problem

FILE = Path("mkdocs.yml")
BEGIN, END = "      # problems:begin, written by `make docs`\n", "      # problems:end\n"


def navigation(suite: Sequence[Problem]) -> str:
    """Returns an entry for each problem, grouped by category."""
    lines = []
    ordered = sorted(suite, key=lambda problem: (problem.category, problem.id))
    for category, members in groupby(ordered, key=lambda problem: problem.category):
        words = category.replace("_", " ")
        lines.append(f"      - {'FSDP and ZeRO' if words == 'fsdp zero' else words.capitalize()}:\n")
        lines += [f'          - "{problem.id} {problem.slug}": docs/problems/{page_name(problem)}\n' for problem in members]
    return "".join(lines)


def filled(text: str, suite: Sequence[Problem]) -> str:
    """Returns the text of ``mkdocs.yml`` with these problems; raises UsageError if its comments are missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{FILE} has no lines between {BEGIN.strip()!r} and {END.strip()!r}; put both comments back, below Problems")
    return f"{head}{begin}{navigation(suite)}{end}{tail}"


def file(root: Path, suite: Sequence[Problem]) -> dict[Path, str]:
    """Returns path -> text of the ``mkdocs.yml`` below ``root``, with these problems."""
    return {FILE: filled((root / FILE).read_text(encoding="utf-8"), suite)}
