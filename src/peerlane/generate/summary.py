"""A board of models as ``peerlane metrics`` prints it: as plain data, and as tables for a terminal."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from peerlane.generate import metrics
from peerlane.generate.board import PUBLISHED_FILE, Board, Count, Entry, public_categories
from peerlane.generate.metrics import CORRECT, Metric
from peerlane.generate.samples import MODES, Task
from peerlane.report.tables import NOT_MEASURED, TextTable
from peerlane.report.tiers import LATENCY_US

_Item = TypeVar("_Item")


def summary(board: Board, entry: Entry, ks: Sequence[int], ps: Sequence[float]) -> dict[str, Any]:
    """Returns all metrics of a model as JSON can hold them; what was not measured is None.

    ``without_multicast`` has the shares of the samples that do not need NVLink multicast.
    """
    usable, cost = entry.usable(ks), entry.usage.cost_usd
    categories = {name: tasks for name, tasks in board.categories.items() if name != "total"}
    return {
        "model": entry.author,
        "setting": None if board.key is None else {**vars(board.key), "node_class": str(board.key.node_class)},
        **_shares(entry, ks, ps),
        "needs_multicast": entry.needs_multicast,
        "without_multicast": _shares(entry.without_multicast, ks, ps),
        "by_category": {name: _category(entry, usable, tasks) for name, tasks in categories.items()},
        "by_regime": {name: _part(entry, usable, tasks) for name, tasks in board.bounds.items()},
        "by_tier": {name: _part(entry, usable, tasks) for name, tasks in board.tiers.items()},
        "by_problem": {str(task.problem): _problem(entry, task, category) for task, category in board.tasks.items()},
        "verdicts": entry.verdicts,
        "mechanisms": entry.mechanisms,
        "usage": {
            **vars(entry.usage),
            "wall_seconds": entry.seconds,
            "cost_usd_per_correct": cost / entry.correct if cost is not None and entry.correct else None,
        },
        "by_step": entry.steps,
    }


def _shares(entry: Entry, ks: Sequence[int], ps: Sequence[float]) -> dict[str, Any]:
    """Returns the denominators, and the metrics that are shares of them or means over them."""
    usable = entry.usable(ks) if entry.tasks else []
    return {
        "problems": len(entry.tasks),
        "tried": len(entry.tried),
        "samples": len(entry.samples),
        "unjudged_samples": entry.unjudged,
        "pass_at_k": {str(k): _estimate(entry.count(CORRECT, k)) for k in usable},
        "fast_p_at_k": dict.fromkeys(MODES)
        | {mode: {f"{p:g}": {str(k): _estimate(entry.count(Metric(mode, p), k)) for k in usable} for p in ps} for mode in entry.modes},
        "geometric_mean": dict.fromkeys(MODES)
        | {mode: {str(k): entry.geometric_mean(mode, k)._asdict() for k in usable} for mode in entry.modes},
    }


def _estimate(count: Count) -> dict[str, float]:
    """Returns the expected number of problems solved, with its interval, and the share.

    ``problems_most`` and ``share_most`` are what they would be if every unjudged sample passed.
    """
    tasks, solved, most, share = count
    ends = {"problems": solved, "problems_most": most, "low": share.low * tasks, "high": share.high * tasks}
    return {**ends, "share": share.value, "share_most": most / tasks}


def _category(entry: Entry, ks: Sequence[int], tasks: Sequence[Task]) -> dict[str, Any]:
    shares: dict[str, Any] = {"problems": len(tasks)}
    for k in ks:
        _, shares[f"correct@{k}"], shares[f"correct_most@{k}"], _ = entry.count(CORRECT, k, tasks)
    return shares


def _problem(entry: Entry, task: Task, category: str) -> dict[str, Any]:
    group = sorted(entry.groups[task], key=lambda sample: sample.number)
    speedups = {mode: [sample.speedups[mode].median for sample in group if sample.correct and mode in sample.speedups] for mode in MODES}
    best = {mode: max(values, default=None) for mode, values in speedups.items()}
    verdicts = [sample.verdict for sample in group]
    return {"category": category, "correct": sum(sample.correct for sample in group), "verdicts": verdicts, "best": best}


def _part(entry: Entry, ks: Sequence[int], tasks: Sequence[Task]) -> dict[str, Any]:
    """Returns what of some of the problems was solved."""
    part: dict[str, Any] = {"problems": len(tasks)}
    part |= {f"correct@{k}": entry.count(CORRECT, k, tasks).share._asdict() for k in ks}
    return part | {f"fast_1@{ks[-1]} {mode}": entry.count(Metric(mode, 1.0), ks[-1], tasks).share._asdict() for mode in entry.modes}


def _table(rows: Iterable[_Item], left: Collection[str], columns: Mapping[str, Callable[[_Item], str]]) -> TextTable:
    """Returns a table of declared columns, each with the function that makes its cells; those on the left hold words."""
    table = TextTable(list(columns), right=columns.keys() - set(left))
    for row in rows:
        table.add(*(cell(row) for cell in columns.values()))
    return table


def _by_model(board: Board, cell: Callable[[Entry, _Item], str]) -> dict[str, Callable[[_Item], str]]:
    """Returns a column for each model."""
    return {entry.author: lambda row, entry=entry: cell(entry, row) for entry in board.entries}  # type: ignore[misc]


def regime_table(board: Board, k: int, p: float, mode: str) -> TextTable:
    """Returns one row a model, and kind of task (bound by latency or bandwidth) or tier of difficulty, with shares and 95 % intervals."""
    names = {"latency": f"bound below {LATENCY_US:g} us (latency)", "bandwidth": "bandwidth or compute"}
    rows = [(names.get(name, name), entry, tasks) for entry in board.entries for name, tasks in {**board.bounds, **board.tiers}.items()]

    def share(entry: Entry, metric: Metric, tasks: Sequence[Task]) -> str:
        estimate = entry.count(metric, k, tasks).share if metric.mode in ("", *entry.modes) else None
        return NOT_MEASURED if estimate is None else f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"

    columns: dict[str, Callable[[tuple[str, Entry, list[Task]]], str]] = {
        "tasks": lambda row: row[0],
        "model": lambda row: row[1].author,
        "problems": lambda row: str(len(row[2])),
        f"correct@{k}": lambda row: share(row[1], CORRECT, row[2]),
        f"fast_{p:g}@{k} {mode}": lambda row: share(row[1], Metric(mode, p), row[2]),
    }
    return _table(rows, columns.keys() - {"problems"}, columns)


def category_table(board: Board, ks: Sequence[int], p: float, mode: str) -> TextTable:
    """Categories by models: how many problems are expected to be solved with the first and with the last of ``ks`` samples.

    ``faster`` counts those with a speedup above p in this mode, by the lower end of the interval. Beside each category stands that of the
    public benchmark with its size.
    """
    first, last = min(ks), max(ks)
    title = f"@{first}" if first == last else f"@{first} -> @{last}"
    models = [f"{entry.author}: {what} {title}" for entry in board.entries for what in ("correct", "faster")]
    table = TextTable(["category", "problems", "public benchmark", *models], right={"problems", *models}, spare=["public benchmark"])
    theirs = public_categories()
    for name, size, cells in category_cells(board, ks, (CORRECT, Metric(mode, p)), " to ", " -> ", NOT_MEASURED):
        table.add(name, str(size), theirs.get(name, "-"), *cells)
    return table


def category_cells(
    board: Board, ks: Sequence[int], tests: Sequence[Metric], to: str, arrow: str, missing: str
) -> Iterator[tuple[str, int, list[str]]]:
    """Yields for each category its number of tasks, and for each author and test the tasks solved with the fewest and the most samples."""
    for name, tasks in board.categories.items():
        cells = []
        for entry in board.entries:
            for metric in tests:
                counts = [entry.count(metric, k, tasks) for k in dict.fromkeys((min(ks), max(ks)))]
                text = arrow.join(ranged(count.solved, count.most, to) for count in counts)
                cells.append(text if metric.mode in ("", *entry.modes) else missing)
        yield name, len(tasks), cells


def model_table(board: Board, ks: Sequence[int], ps: Sequence[float]) -> TextTable:
    """Returns one row for every model, metric and k, with 95 % intervals; both ends where samples were not judged.

    A model with samples that need NVLink multicast has its rows once more, without these.
    """
    table = TextTable(["model", "metric", "k", "problems", "95 %", "share"], right={"k", "problems", "share"})
    others = [entry.without_multicast for entry in board.entries if entry.needs_multicast]
    for entry in [*board.entries, *(other for other in others if other.tasks)]:
        for k in entry.usable(ks):
            for metric in (CORRECT, *(Metric(mode, p) for mode in MODES for p in ps)):
                if metric.mode not in ("", *entry.modes):
                    table.add(entry.author, metric.name, str(k), NOT_MEASURED, "-", "-")
                    continue
                tasks, solved, most, share = entry.count(metric, k)
                interval = f"{share.low * tasks:.1f} to {share.high * tasks:.1f}"
                shares = " to ".join(dict.fromkeys(f"{end:.1%}" for end in (share.value, most / tasks)))
                table.add(entry.author, metric.name, str(k), ranged(solved, most), interval, shares)
            for mode in entry.modes:
                mean = entry.geometric_mean(mode, k)
                interval = f"{mean.low:.3f} to {mean.high:.3f}"
                table.add(entry.author, f"geometric mean {mode}", str(k), f"{mean.value:.3f}", interval, "-")
    return table


def verdict_table(board: Board) -> TextTable:
    """Returns how the samples of each model ended; a column adds up to its number of samples."""
    counts = {entry.author: entry.verdicts | {"samples": len(entry.samples)} for entry in board.entries}
    kinds = dict.fromkeys(kind for count in counts.values() for kind in count if kind != "samples")

    def cell(entry: Entry, kind: str) -> str:
        return str(counts[entry.author].get(kind, 0))

    return _table([*kinds, "samples"], {"verdict"}, {"verdict": str, **_by_model(board, cell)})


def usage_table(board: Board) -> TextTable:
    """Returns tokens and cost of each model."""

    def price(cost: float | None, of: int = 1) -> str:
        return "-" if cost is None or not of else f"{cost / of:.2f}"

    columns: dict[str, Callable[[Entry], str]] = {
        "model": lambda entry: entry.author,
        "calls": lambda entry: f"{entry.usage.calls:,}",
        "input tokens": lambda entry: f"{entry.usage.input_tokens:,}",
        "from cache": lambda entry: f"{entry.usage.cached_tokens:,}",
        "output tokens": lambda entry: f"{entry.usage.output_tokens:,}",
        "reasoning": lambda entry: f"{entry.usage.reasoning_tokens:,}",
        "USD": lambda entry: price(entry.usage.cost_usd),
        "USD per correct": lambda entry: price(entry.usage.cost_usd, entry.correct),
        "hours": lambda entry: f"{entry.seconds / 3600:.2f}",
    }
    return _table(board.entries, {"model"}, columns)


def step_table(board: Board) -> TextTable:
    """Returns, for agents, how many problems one episode is expected to solve within so many steps."""

    def cell(entry: Entry, step: int) -> str:
        return _number(entry.steps[min(step, len(entry.steps)) - 1]) if entry.steps else "-"

    longest = max((len(entry.steps) for entry in board.entries), default=0)
    return _table(range(1, longest + 1), (), {"steps": str, **_by_model(board, cell)})


def problem_table(board: Board) -> TextTable:
    """Returns one row a problem: how many of its samples are correct, of how many."""

    def cell(entry: Entry, task: Task) -> str:
        return f"{sum(sample.correct for sample in entry.groups[task])} of {len(entry.groups[task])}"

    columns: dict[str, Callable[[Task], str]] = {"problem": lambda task: str(task.problem), "category": lambda task: board.tasks[task]}
    return _table(board.tasks, {"problem", "category"}, {**columns, **_by_model(board, cell)})


def comparison_lines(a: Entry, b: Entry, ks: Sequence[int], p: float) -> list[str]:
    """Compares A with B by a paired bootstrap over problems, one line for every metric."""
    lines = []
    for k in ks:
        for metric in (CORRECT, *(Metric(mode, p) for mode in a.modes if mode in b.modes)):
            comparison = metrics.compare(a.solved(metric, k)[0], b.solved(metric, k)[0])
            low, high = (f"{100 * value:+.1f}" for value in comparison.difference[1:])
            lines.append(
                f"{metric.name}@{k}: {a.author} minus {b.author} is {100 * comparison.difference.value:+.1f} points [{low}, {high}] over "
                f"{comparison.problems} problems; ahead in {comparison.better:.1%} of resamples"
            )
    return lines


def published_table() -> tuple[str, TextTable]:
    """Figures that others published, with a line that says whose they are and why they are not comparable."""
    data = json.loads(PUBLISHED_FILE.read_text())
    cells = [f"{model}: {what} @1 -> @3" for model in data["models"] for what in ("correct", "faster")]
    table = TextTable(["category (theirs)", "problems", *cells], right={"problems", *cells})
    for category, row in data["categories"].items():
        figures = [pair for model in data["models"] for pair in (row[model][:2], row[model][2:])]
        table.add(category, str(row["problems"]), *(f"{first} -> {last}" for first, last in figures))
    return data["label"], table


def ranged(low: float, high: float, to: str = " to ") -> str:
    """Returns both ends of a count, or one number where they are alike."""
    return to.join(dict.fromkeys(map(_number, (low, high))))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 1e-9 else f"{value:.1f}"
