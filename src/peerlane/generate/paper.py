"""Metrics for a paper: long tables of raw numbers, and LaTeX tables with caption, label and a header of two rows."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peerlane.generate import metrics
from peerlane.generate.judging import MODES
from peerlane.generate.summary import Scored, category_groups, ends_of, public_categories, ranged

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


def write_csv(folder: Path, models: Sequence[Scored], ks: Sequence[int], ps: Sequence[float]) -> list[Path]:
    """Writes a file for each long table, one observation a line, with raw numbers; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in long_tables(models, ks, ps).items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if not columns:
            continue
        written.append(folder / f"{name}.csv")
        with written[-1].open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            table.writeheader()
            table.writerows({column: _cell(value) for column, value in row.items()} for row in rows)
    return written


def _cell(value: Any) -> Any:
    """A spreadsheet must not take a text, such as a model's name, for a formula."""
    if not isinstance(value, str):
        return value
    text = _printable(value)  # a carriage return would begin a row
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def long_tables(models: Sequence[Scored], ks: Sequence[int], ps: Sequence[float]) -> dict[str, list[Row]]:
    """Returns the tables ``metrics``, ``groups``, ``samples``, ``usage`` and ``steps``, each as rows of one form."""
    return {
        "metrics": [row for scored in models for row in _metrics(scored, ks, ps)],
        "groups": [row for scored in models for row in _groups(scored, ks, ps)],
        "samples": [row for scored in models for row in _samples(scored)],
        "usage": [
            {"model": scored.model, **vars(metrics.total_usage(scored.attempts)), "wall_seconds": sum(a.seconds for a in scored.attempts)}
            for scored in models
        ],
        "steps": [
            {"model": scored.model, "steps": steps, "correct": value}
            for scored in models
            for steps, value in enumerate(metrics.step_curve(scored.attempts, list(scored.problems), metrics.is_correct), 1)
        ],
    }


def _tests(scored: Scored, ps: Sequence[float]) -> Iterator[tuple[Row, metrics.Test]]:
    """Correctness, and what was measured of speed, each with the columns that name it."""
    yield {"metric": "correct", "mode": "", "p": ""}, metrics.is_correct
    for mode in MODES:
        for p in ps if metrics.is_timed(scored.attempts, mode) else ():
            yield {"metric": "fast", "mode": mode, "p": p}, metrics.is_faster(p, mode)


def _metrics(scored: Scored, ks: Sequence[int], ps: Sequence[float]) -> Iterator[Row]:
    numbers = list(scored.problems)
    for k in ks:
        for names, test in _tests(scored, ps):
            yield {"model": scored.model, **names, "k": k, "problems": len(numbers), **_ends(scored, test, k, numbers)}
        for mode in MODES:
            if metrics.is_timed(scored.attempts, mode):
                mean = metrics.geometric_mean(metrics.log_speedups(scored.attempts, numbers, mode, k))
                names = {"metric": "geometric_mean", "mode": mode, "p": "", "k": k, "problems": len(numbers)}
                yield {"model": scored.model, **names, "value": mean.value, "low": mean.low, "high": mean.high}


def _ends(scored: Scored, test: metrics.Test, k: int, numbers: Sequence[int]) -> Row:
    """Shares of these problems, with unjudged samples wrong (``value``) and right (``value_most``)."""
    least, most = (list(map(found.__getitem__, numbers)) for found in (scored.counts(test, k), scored.most(test, k)))
    share = metrics.share(least, most)
    return {"value": share.value, "value_most": sum(most) / len(most), "low": share.low, "high": share.high}


def _groups(scored: Scored, ks: Sequence[int], ps: Sequence[float]) -> Iterator[Row]:
    """Categories, with the public benchmark's name of each; kinds of bound; tiers."""
    theirs = {ours: name.rpartition(": ") for ours, name in public_categories().items()}
    groups = [("category", name, numbers) for name, numbers in category_groups(scored.problems)]
    groups += [("bound", name, numbers) for name, numbers in scored.regimes().items()]
    groups += [("tier", name, numbers) for name, numbers in scored.tiers().items()]
    for grouping, name, numbers in groups:
        public, _, size = theirs.get(name, ("", "", "")) if grouping == "category" else ("", "", "")
        about = {"grouping": grouping, "group": name, "public_category": public, "public_problems": size, "problems": len(numbers)}
        for k in ks:
            for names, test in _tests(scored, ps):
                yield {"model": scored.model, **about, **names, "k": k, **_ends(scored, test, k, numbers)}


def _samples(scored: Scored) -> Iterator[Row]:
    for attempt in scored.attempts:
        row = {"model": scored.model, "problem": attempt.problem, "category": scored.problems[attempt.problem], "sample": attempt.sample}
        row |= {"verdict": attempt.verdict, "judged": attempt.judged, "needs_multicast": attempt.needs_multicast}
        for mode in MODES:
            found = attempt.speedups.get(mode)
            row |= {f"speedup_{mode}_{end}": getattr(found, end, "") for end in ("low", "median", "high")}
        row |= {"input_tokens": attempt.usage.input_tokens, "output_tokens": attempt.usage.output_tokens, "seconds": attempt.seconds}
        yield row


def latex_tables(models: Sequence[Scored], ks: Sequence[int], p: float, mode: str) -> str:
    """Returns two tables for a paper: categories by models, and metrics with their intervals. They need ``booktabs``."""
    first, last = min(ks), max(ks)
    at = f"@{first}" if first == last else rf"@{first} $\to$ @{last}"
    setting = f" Judged in {escape_latex(str(models[0].setting))}." if models[0].setting is not None else ""
    unjudged = " Ranges: unjudged samples all wrong, to all right." if any(metrics.unjudged(scored.attempts) for scored in models) else ""
    timed = [scored for scored in models if metrics.is_timed(scored.attempts, mode)]
    faster = f"; faster: more than {p:g} times the reference's speed in {mode} mode" if timed else ""

    def cells(scored: Scored, numbers: Sequence[int]) -> list[str]:
        tests = [metrics.is_correct, *([metrics.is_faster(p, mode)] if timed else [])]
        return [
            r" $\to$ ".join(ranged(*ends_of(scored, test, k, numbers), to="--") for k in dict.fromkeys((first, last)))
            if test is metrics.is_correct or scored in timed
            else "--"
            for test in tests
        ]

    wide = 2 if timed else 1
    rows = [
        [escape_latex(name.replace("_", " ")), str(len(numbers)), *(cell for scored in models for cell in cells(scored, numbers))]
        for name, numbers in category_groups(models[0].problems)
    ]
    categories = _table(
        f"Problems solved, {at}{faster}.{setting}{unjudged}",
        "tab:peerlane-categories",
        [("", 2), *((scored.model, wide) for scored in models)],
        ["category", "problems", *(["correct", "faster"][:wide] * len(models))],
        [*rows[:-1], [r"\midrule " + rows[-1][0], *rows[-1][1:]]],
    )
    tests = list({tuple(names.values()): (names, test) for scored in models for names, test in _tests(scored, [p])}.values())
    titles = [escape_latex(" ".join(word for word in (names["metric"], names["mode"]) if word)) for names, _ in tests]
    shares = _table(
        f"Shares of {len(models[0].problems)} problems in per cent, with 95\\,\\% intervals over problems.{setting}{unjudged}",
        "tab:peerlane-metrics",
        [("", 1), *((f"@{k}", len(tests)) for k in dict.fromkeys((first, last)))],
        ["model", *(titles * len({first, last}))],
        [[escape_latex(scored.model), *_percents(scored, tests, dict.fromkeys((first, last)))] for scored in models],
    )
    return f"{categories}\n{shares}"


def _percents(scored: Scored, tests: Sequence[tuple[Row, metrics.Test]], ks: Iterable[int]) -> Iterator[str]:
    for k in ks:
        for names, test in tests:
            if names["mode"] and not metrics.is_timed(scored.attempts, names["mode"]):
                yield "--"
                continue
            found = _ends(scored, test, k, list(scored.problems))
            value = "--".join(dict.fromkeys(f"{100 * found[end]:.1f}" for end in ("value", "value_most")))
            yield f"{value} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def _table(caption: str, label: str, groups: Sequence[tuple[str, int]], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads, rules, place = [], [], 1
    for name, wide in groups:
        heads.append(rf"\multicolumn{{{wide}}}{{c}}{{{escape_latex(name)}}}")
        rules += [rf"\cmidrule(lr){{{place}-{place + wide - 1}}}"] if name else []
        place += wide
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
    return re.sub(r"[&%$#_{}\\~^<>|\[\]*]", lambda found: _ESCAPED[found[0]], _printable(text))
