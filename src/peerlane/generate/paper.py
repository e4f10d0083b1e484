"""Metrics for a paper: long tables of raw numbers, and LaTeX tables with caption, label and a header of two rows."""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peerlane.errors import UsageError
from peerlane.generate.board import Board, Entry, public_categories
from peerlane.generate.metrics import CORRECT, Metric
from peerlane.generate.samples import MODES, Task
from peerlane.generate.summary import category_cells

Row = Mapping[str, Any]
_ESCAPED = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"{{{character}}}" for character in "[]*"},
}
_FORMULA = tuple("=+-@＝＋－＠")


def write_csv(folder: Path, board: Board, ks: Sequence[int], ps: Sequence[float]) -> list[Path]:
    """Writes a file for each long table, one observation a line, with raw numbers; returns the files.

    Raises UsageError if the folder cannot be made, or a file in it cannot be written.
    """
    tables = {folder / f"{name}.csv": rows for name, rows in long_tables(board, ks, ps).items() if rows}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, rows in tables.items():
            with path.open("w", newline="", encoding="utf-8") as file:
                columns = list(dict.fromkeys(column for row in rows for column in row))
                table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
                table.writeheader()
                table.writerows({column: _cell(value) for column, value in row.items()} for row in rows)
    except OSError as error:
        raise UsageError(f"--csv got {folder}, and {error.filename} cannot be written: {error.strerror}; name a folder") from None
    return list(tables)


def _cell(value: Any) -> Any:
    """A spreadsheet must not take a text, such as a model's name, for a formula."""
    if not isinstance(value, str):
        return value
    text = _printable(value)  # a carriage return would begin a row
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def long_tables(board: Board, ks: Sequence[int], ps: Sequence[float]) -> dict[str, list[Row]]:
    """Returns the tables ``metrics``, ``groups``, ``samples``, ``usage`` and ``steps``, each as rows of one form."""
    entries = board.entries
    return {
        "metrics": [row for entry in entries for row in _metrics(entry, ks, ps)],
        "groups": [row for entry in entries for row in _groups(board, entry, ks, ps)],
        "samples": [row for entry in entries for row in _samples(board, entry)],
        "usage": [{"model": entry.author, **vars(entry.usage), "wall_seconds": entry.seconds} for entry in entries],
        "steps": [
            {"model": entry.author, "steps": steps, "correct": value} for entry in entries for steps, value in enumerate(entry.steps, 1)
        ],
    }


def _about(metric: Metric, k: int) -> Row:
    return {"metric": metric.name.partition("_")[0], "mode": metric.mode, "p": metric.p if metric.mode else "", "k": k}


def _metrics(entry: Entry, ks: Sequence[int], ps: Sequence[float]) -> Iterator[Row]:
    size = {"problems": len(entry.tasks)}
    for k in ks:
        for metric in entry.metrics(ps):
            yield {"model": entry.author, **_about(metric, k), **size, **_ends(entry, metric, k, entry.tasks)}
        for mode in entry.modes:
            mean = entry.geometric_mean(mode, k)
            names = {**_about(CORRECT, k), "metric": "geometric_mean", "mode": mode}
            yield {"model": entry.author, **names, **size, "value": mean.value, "low": mean.low, "high": mean.high}


def _ends(entry: Entry, metric: Metric, k: int, tasks: Collection[Task]) -> Row:
    """Shares of these problems, with unjudged samples wrong (``value``) and right (``value_most``)."""
    count = entry.count(metric, k, tasks)
    return {"value": count.share.value, "value_most": count.most / count.tasks, "low": count.share.low, "high": count.share.high}


def _groups(board: Board, entry: Entry, ks: Sequence[int], ps: Sequence[float]) -> Iterator[Row]:
    """Categories, with the public benchmark's name of each; kinds of bound; tiers."""
    theirs = {ours: name.rpartition(": ") for ours, name in public_categories().items()}
    for grouping, groups in (("category", board.categories), ("bound", board.bounds), ("tier", board.tiers)):
        for name, tasks in groups.items():
            public, _, size = theirs.get(name, ("", "", "")) if grouping == "category" else ("", "", "")
            about = {"grouping": grouping, "group": name, "public_category": public, "public_problems": size, "problems": len(tasks)}
            for k in ks:
                for metric in entry.metrics(ps):
                    yield {"model": entry.author, **about, **_about(metric, k), **_ends(entry, metric, k, tasks)}


def _samples(board: Board, entry: Entry) -> Iterator[Row]:
    for sample in entry.samples:
        row = {"model": entry.author, "problem": sample.problem, "category": board.tasks[sample.task], "sample": sample.number}
        row |= {"verdict": sample.verdict, "judged": sample.judged, "needs_multicast": sample.needs_multicast}
        for mode in MODES:
            row |= {f"speedup_{mode}_{end}": getattr(sample.speedups.get(mode), end, "") for end in ("low", "median", "high")}
        yield row | {"input_tokens": sample.usage.input_tokens, "output_tokens": sample.usage.output_tokens, "seconds": sample.seconds}


def latex_tables(board: Board, ks: Sequence[int], p: float, mode: str) -> str:
    """Returns two tables for a paper: categories by models, and metrics with their intervals. They need ``booktabs``."""
    ks = sorted({min(ks), max(ks)})
    at = r" $\to$ ".join(f"@{k}" for k in ks)
    setting = f" Judged in {escape_latex(str(board.key))}." if board.key is not None else ""
    unjudged = " Ranges: unjudged samples all wrong, to all right." if any(entry.unjudged for entry in board.entries) else ""
    timed = any(mode in entry.modes for entry in board.entries)
    faster = f"; faster: more than {p:g} times the reference's speed in {mode} mode" if timed else ""
    tests = [CORRECT, *([Metric(mode, p)] if timed else [])]
    rows = [
        [escape_latex(name.replace("_", " ")), str(size), *cells]
        for name, size, cells in category_cells(board, ks, tests, "--", r" $\to$ ", "--")
    ]
    categories = _table(
        f"Problems solved, {at}{faster}.{setting}{unjudged}",
        "tab:peerlane-categories",
        [("", 2), *((entry.author, len(tests)) for entry in board.entries)],
        ["category", "problems", *(["correct", "faster"][: len(tests)] * len(board.entries))],
        [*rows[:-1], [r"\midrule " + rows[-1][0], *rows[-1][1:]]],
    )
    every = list(dict.fromkeys(metric for entry in board.entries for metric in entry.metrics([p])))
    titles = ["fast " + metric.mode if metric.mode else "correct" for metric in every]
    shares = _table(
        f"Shares of {len(board.tasks)} problems in per cent, with 95\\,\\% intervals over problems.{setting}{unjudged}",
        "tab:peerlane-metrics",
        [("", 1), *((f"@{k}", len(every)) for k in ks)],
        ["model", *(titles * len(ks))],
        [[escape_latex(entry.author), *(_percents(entry, metric, k) for k in ks for metric in every)] for entry in board.entries],
    )
    return f"{categories}\n{shares}"


def _percents(entry: Entry, metric: Metric, k: int) -> str:
    if metric.mode not in ("", *entry.modes):
        return "--"
    ends = _ends(entry, metric, k, entry.tasks)
    value = "--".join(dict.fromkeys(f"{100 * ends[end]:.1f}" for end in ("value", "value_most")))
    return f"{value} [{100 * ends['low']:.0f}, {100 * ends['high']:.0f}]"


def _table(caption: str, label: str, groups: Sequence[tuple[str, int]], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads, rules, first = [], [], 1
    for name, wide in groups:
        heads.append(rf"\multicolumn{{{wide}}}{{c}}{{{escape_latex(name)}}}")
        rules += [rf"\cmidrule(lr){{{first}-{first + wide - 1}}}"] if name else []
        first += wide
    lines = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            *(r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}}}", rf"\label{{{label}}}"),
            *(rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", " & ".join(heads) + r" \\", " ".join(rules)),
            *(" & ".join(columns) + r" \\", r"\midrule", *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""),
        ]
    )


def escape_latex(text: str) -> str:
    """Returns the text with all that LaTeX would obey written out. Brackets and stars would belong to the end of the row before."""
    return re.sub(r"[&%$#_{}\\~^<>|\[\]*]", lambda match: _ESCAPED[match[0]], _printable(text))
