"""One function that makes every table of measurements: the page declares the columns, a stored row has the figures."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from peerlane.common.words import counted
from peerlane.errors import UsageError
from peerlane.hardware.environment import node_class
from peerlane.report.mechanisms import size_text
from peerlane.report.tables import TextTable

Row: TypeAlias = dict[str, Any]
R = TypeVar("R")


def table(rows: Iterable[R], columns: Mapping[str, str | Callable[[R], str]], words: Collection[str] = ()) -> str:
    """Returns a line for each of ``rows``, as Markdown.

    ``columns``: title -> a function of a row, or what :func:`cell` shows of it. ``words``: titles of columns that hold no numbers.
    """
    made = TextTable(tuple(columns), right=set(columns) - set(words))
    for row in rows:
        made.add(*(show(row) if callable(show) else cell(row, show) for show in columns.values()))
    return made.markdown()


def cell(row: Any, keys: str) -> str:
    """Returns the figures of a row that ``keys`` names, with strokes between them: ``bytes``, or ``ours_us / nccl_us``.

    Of figures with a comma between them the smallest is shown. A dash stands for a missing one, unless it is the last of several.
    ``bytes`` is shown as a size, and what ends in ``_us`` as a time.
    """
    return " / ".join(_smallest(row, key.split(", ")) for key in keys.split(" / ")).removesuffix(" / -")


def _smallest(row: Any, keys: list[str]) -> str:
    values = [row[key] for key in keys if key in row]
    if not values:
        return "-"
    if keys == ["bytes"]:
        return size_text(values[0])
    return time_us(min(values)) if keys[0].endswith("_us") else str(min(values))


def time_us(value: float) -> str:
    """Returns microseconds with three digits."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def measured(path: Path, columns: Mapping[str, str | Callable[[Row], str]], *, key: str, words: Collection[str] = (), **only: Any) -> str:
    """Returns the table of the rows in a file that hold ``only``, and below it where they were measured.

    ``key``: names of what tells rows apart, with spaces between them. Of several with the same key the newest one is shown.
    """
    newest = {tuple(row[name] for name in key.split()): row for row in read_rows(path, **only)}
    rows = [newest[place] for place in sorted(newest)]
    return f"{table(rows, columns, words)}\n{where(rows[-1])}\n"


def by_operation(path: Path, operation: str, figures: str, **only: Any) -> str:
    """Returns such a table with a line for each size and a column for each operation.

    ``operation``: the key of a row that names it. ``figures``: what :func:`cell` shows of it.
    """
    rows = read_rows(path, **only)
    sizes: dict[int, Row] = {}
    for row in rows:
        sizes.setdefault(row["bytes"], {"bytes": row["bytes"]})[row[operation]] = cell(row, figures)
    columns = {"size": "bytes", **{row[operation].replace("_", "-"): row[operation] for row in rows}}
    return f"{table([sizes[size] for size in sorted(sizes)], columns)}\n{where(rows[-1])}\n"


def read_rows(path: Path, **only: Any) -> list[Row]:
    """Reads the rows of a file that hold ``only``: of one measurement, or JSON lines. Each row knows where it was measured. A side's time,
    as ``{"nccl": {"median_us": 1.0}}`` or ``{"us": {"nccl": 1.0}}``, is ``nccl_us`` of the row. Raises UsageError if there are none."""
    try:
        text = path.read_text(encoding="utf-8")
        document = {"rows": [json.loads(line) for line in text.splitlines()]} if path.suffix == ".jsonl" else json.loads(text)
        ranks = document.get("ranks") or document.get("world_size")
        place = {name: value for name, value in (("ranks", ranks), ("environment", document.get("environment"))) if value}
        rows = [{**row, **_times(row), **place} for row in document.get("rows") or document.get("speeds") or document["table"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} holds no rows of a measurement ({error!r}): expected what a script of tests/gpu writes there") from None
    found = [row for row in rows if all(row.get(name) == value for name, value in only.items())]
    if not found:
        raise UsageError(f"{path} has no row with {only}: expected what a script of tests/gpu writes there")
    return found


def _times(row: Row) -> Row:
    medians = {name: side["median_us"] for name, side in row.items() if isinstance(side, dict) and "median_us" in side}
    times: Row = row.get("us") or row.get("microseconds") or {}
    return {f"{name}_us": us for name, us in (medians | times).items()}


def where(row: Row) -> str:
    """Returns where a row was measured, in a sentence."""
    ranks = f"; {counted(row['ranks'], 'rank')}" if "ranks" in row else ""
    if "environment" not in row:
        return f"Node: {row.get('gpus', 1)}x {row['gpu']}{ranks}."
    software = row["environment"]["software"]
    return f"Node: {node_class(row['environment'])}{ranks}; torch {software['torch']}, nccl {software['nccl']}."
