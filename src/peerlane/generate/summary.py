"""The output of ``peerlane metrics``: the metrics of a run as plain data, and tables of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerlane import problems
from peerlane.errors import UsageError
from peerlane.generate import metrics
from peerlane.generate.attempts import Attempt, Setting
from peerlane.generate.judging import MODES
from peerlane.report.tables import NOT_MEASURED, TextTable
from peerlane.report.tiers import LATENCY_US, bound_us, regime, tiers

PUBLISHED_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Scored:
    """A model's attempts under one setting, to be summarised.

    Attributes:
        problems: number -> category, of all problems that count.
    """

    model: str
    setting: Setting | None
    attempts: Sequence[Attempt]
    problems: Mapping[int, str]

    @property
    def samples(self) -> int:
        """Samples of the problem that has the most, judged or not."""
        return max((len(group) for group in metrics.by_problem(self.attempts, list(self.problems)).values()), default=0)

    def without_multicast(self) -> Scored:
        """Returns the same without the attempts that need NVLink multicast, and without problems all of whose attempts do."""
        attempts, numbers = metrics.without_multicast(self.attempts, list(self.problems))
        return replace(self, attempts=attempts, problems={number: self.problems[number] for number in numbers})

    def regimes(self) -> dict[str, list[int]]:
        """Problems by what bounds the judged case: ``latency`` (a roofline below 20 us) or ``bandwidth``; none without a setting."""
        groups: dict[str, list[int]] = {}
        for number in self.problems if self.setting is not None else ():
            with contextlib.suppress(UsageError):
                assert self.setting is not None
                bound = bound_us(problems.get(number), self.setting.preset, self.setting.world_size)
                groups.setdefault(regime(bound), []).append(number)
        return dict(sorted(groups.items()))

    def tiers(self) -> dict[str, list[int]]:
        """Problems of the suite by tier of difficulty, see :mod:`peerlane.report.tiers`."""
        known = tiers()
        groups = {name: [number for number in self.problems if known.get(number) == name] for name in ("easy", "medium", "hard")}
        return {name: group for name, group in groups.items() if group}

    def counts(self, test: metrics.Test, k: int) -> dict[int, float]:
        """Returns by problem the probability that k samples hold one that passes, if every unjudged sample is wrong."""
        return metrics.solved(self.attempts, list(self.problems), test, k)

    def most(self, test: metrics.Test, k: int) -> dict[int, float]:
        """Returns the same if every unjudged sample passes."""
        return metrics.solved(self.attempts, list(self.problems), test, k, unjudged=True)


def summary(scored: Scored, ks: Sequence[int], ps: Sequence[float]) -> dict[str, Any]:
    """Returns all metrics of a model as JSON can hold them; what was not measured is None.

    ``without_multicast`` has the shares of the samples that do not need NVLink multicast.
    """
    numbers = list(scored.problems)
    usage = metrics.total_usage(scored.attempts)
    correct = sum(attempt.correct for attempt in scored.attempts)
    return {
        "model": scored.model,
        "setting": None if scored.setting is None else vars(scored.setting),
        **_shares(scored, ks, ps),
        "needs_multicast": metrics.needing_multicast(scored.attempts),
        "without_multicast": _shares(scored.without_multicast(), ks, ps),
        "by_category": _by_category(scored, _usable(scored, ks)),
        "by_regime": {name: _part(scored, _usable(scored, ks), group) for name, group in scored.regimes().items()},
        "by_tier": {name: _part(scored, _usable(scored, ks), group) for name, group in scored.tiers().items()},
        "by_problem": {str(number): _problem(scored, number) for number in numbers},
        "verdicts": metrics.verdicts(scored.attempts),
        "mechanisms": metrics.mechanisms(scored.attempts),
        "usage": {
            **vars(usage),
            "wall_seconds": sum(attempt.seconds for attempt in scored.attempts),
            "cost_usd_per_correct": usage.cost_usd / correct if usage.cost_usd is not None and correct else None,
        },
        "by_step": metrics.step_curve(scored.attempts, numbers, metrics.is_correct),
    }


def _usable(scored: Scored, ks: Sequence[int]) -> list[int]:
    return [k for k in ks if k <= max(scored.samples, 1)]


def _shares(scored: Scored, ks: Sequence[int], ps: Sequence[float]) -> dict[str, Any]:
    """Returns the denominators, and the metrics that are shares of them or means over them."""
    numbers, usable = list(scored.problems), _usable(scored, ks) if scored.problems else []
    result: dict[str, Any] = {
        "problems": len(numbers),
        "tried": len(metrics.tried(scored.attempts)),
        "samples": len(scored.attempts),
        "unjudged_samples": metrics.unjudged(scored.attempts),
        "pass_at_k": {str(k): _estimate(scored, metrics.is_correct, k) for k in usable},
        "fast_p_at_k": {},
        "geometric_mean": {},
    }
    for mode in MODES:
        timed = metrics.is_timed(scored.attempts, mode)
        result["fast_p_at_k"][mode] = (
            {f"{p:g}": {str(k): _estimate(scored, metrics.is_faster(p, mode), k) for k in usable} for p in ps} if timed else None
        )
        means = {str(k): metrics.geometric_mean(metrics.log_speedups(scored.attempts, numbers, mode, k))._asdict() for k in usable}
        result["geometric_mean"][mode] = means if timed else None
    return result


def _estimate(scored: Scored, test: metrics.Test, k: int) -> dict[str, float]:
    """Returns the expected number of problems solved, with its interval, and the share.

    ``problems_most`` and ``share_most`` are what they would be if every unjudged sample passed.
    """
    values, most = (list(found.values()) for found in (scored.counts(test, k), scored.most(test, k)))
    mean, count = metrics.share(values, most), len(values)
    found = {"problems": sum(values), "problems_most": sum(most), "low": mean.low * count, "high": mean.high * count}
    return {**found, "share": mean.value, "share_most": sum(most) / count}


def _by_category(scored: Scored, ks: Sequence[int]) -> dict[str, dict[str, Any]]:
    sizes = metrics.by_category(dict.fromkeys(scored.problems, 1.0), scored.problems)
    categories: dict[str, dict[str, Any]] = {category: {"problems": int(size)} for category, size in sizes.items()}
    for k in ks:
        for name, found in (("correct", scored.counts), ("correct_most", scored.most)):
            for category, value in metrics.by_category(found(metrics.is_correct, k), scored.problems).items():
                categories[category][f"{name}@{k}"] = value
    return categories


def _problem(scored: Scored, number: int) -> dict[str, Any]:
    group = [attempt for attempt in scored.attempts if attempt.problem == number]
    best = {
        mode: max((attempt.speedups[mode].median for attempt in group if attempt.correct and mode in attempt.speedups), default=None)
        for mode in MODES
    }
    verdicts = [attempt.verdict for attempt in sorted(group, key=lambda attempt: attempt.sample)]
    return {"category": scored.problems[number], "correct": sum(attempt.correct for attempt in group), "verdicts": verdicts, "best": best}


def _part(scored: Scored, ks: Sequence[int], numbers: Sequence[int]) -> dict[str, Any]:
    """Returns what of some of the problems was solved."""
    part: dict[str, Any] = {"problems": len(numbers)}
    for k in ks:
        part[f"correct@{k}"] = _share_of(scored, metrics.is_correct, k, numbers)._asdict()
    for mode in MODES:
        if metrics.is_timed(scored.attempts, mode):
            part[f"fast_1@{ks[-1]} {mode}"] = _share_of(scored, metrics.is_faster(1.0, mode), ks[-1], numbers)._asdict()
    return part


def _share_of(scored: Scored, test: metrics.Test, k: int, numbers: Sequence[int]) -> metrics.Estimate:
    least, most = scored.counts(test, k), scored.most(test, k)
    return metrics.share([least[number] for number in numbers], [most[number] for number in numbers])


def regime_table(models: Sequence[Scored], k: int, p: float, mode: str) -> TextTable:
    """Returns one row a model, and kind of task (bound by latency or bandwidth) or tier of difficulty, with shares and 95 % intervals."""
    columns = ["tasks", "model", "problems", f"correct@{k}", f"fast_{p:g}@{k} {mode}"]
    table = TextTable(columns, right={"problems"})
    for scored in models:
        timed = metrics.is_timed(scored.attempts, mode)
        names = {"latency": f"bound below {LATENCY_US:g} us (latency)", "bandwidth": "bandwidth or compute"}
        for name, group in {**scored.regimes(), **scored.tiers()}.items():
            faster = _percent(_share_of(scored, metrics.is_faster(p, mode), k, group)) if timed else NOT_MEASURED
            cells = [_percent(_share_of(scored, metrics.is_correct, k, group)), faster]
            table.add(names.get(name, name), scored.model, str(len(group)), *cells)
    return table


def _percent(estimate: metrics.Estimate) -> str:
    return f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"


def category_table(models: Sequence[Scored], ks: Sequence[int], p: float, mode: str) -> TextTable:
    """Categories by models: how many problems are expected to be solved with the first and with the last of ``ks`` samples.

    ``faster`` counts those with a speedup above p in this mode, by the lower end of the interval. Beside each category stands that of the
    public benchmark with its size.
    """
    first, last = min(ks), max(ks)
    title = f"@{first}" if first == last else f"@{first} -> @{last}"
    columns = ["category", "problems", "public benchmark"]
    for scored in models:
        columns += [f"{scored.model}: correct {title}", f"{scored.model}: faster {title}"]
    table = TextTable(columns, right={columns[1], *columns[3:]}, spare=["public benchmark"])
    theirs = public_categories()
    for name, numbers in category_groups(models[0].problems):
        cells = []
        for scored in models:
            for test, measured in ((metrics.is_correct, True), (metrics.is_faster(p, mode), _timed(scored, mode))):
                ends = [ends_of(scored, test, k, numbers) for k in dict.fromkeys((first, last))]
                cells.append(" -> ".join(ranged(*end) for end in ends) if measured else NOT_MEASURED)
        table.add(name, str(len(numbers)), theirs.get(name, "-"), *cells)
    return table


def category_groups(problems: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Returns each category with its problems, and ``total`` with all."""
    groups = {name: [number for number, category in problems.items() if category == name] for name in dict.fromkeys(problems.values())}
    return [*groups.items(), ("total", list(problems))]


def ends_of(scored: Scored, test: metrics.Test, k: int, numbers: Sequence[int]) -> tuple[float, float]:
    """Returns the expected number of these problems that are solved, if all unjudged samples are wrong and if all of them pass."""
    least, most = scored.counts(test, k), scored.most(test, k)
    return sum(least[number] for number in numbers), sum(most[number] for number in numbers)


def public_categories() -> dict[str, str]:
    """Returns by category its name in the public benchmark, with the number of problems that its authors count there."""
    data = json.loads(PUBLISHED_FILE.read_text())
    return {ours: f"{theirs}: {data['categories'][theirs]['problems']}" for ours, theirs in data["ours"].items()}


def model_table(models: Sequence[Scored], ks: Sequence[int], ps: Sequence[float]) -> TextTable:
    """Returns one row for every model, metric and k, with 95 % intervals; both ends where samples were not judged.

    A model with samples that need NVLink multicast has its rows once more, without these.
    """
    table = TextTable(["model", "metric", "k", "problems", "95 %", "share"], right={"k", "problems", "share"})
    every = [(scored, scored.without_multicast()) for scored in models]
    renamed = [replace(rest, model=f"{rest.model}, without multicast") for scored, rest in every if rest.attempts != scored.attempts]
    for scored in [*models, *(rest for rest in renamed if rest.problems)]:
        numbers = list(scored.problems)
        for k in _usable(scored, ks):
            rows: list[tuple[str, metrics.Test, bool]] = [("correct", metrics.is_correct, True)]
            for mode in MODES:
                timed = metrics.is_timed(scored.attempts, mode)
                rows += [(f"fast_{p:g} {mode}", metrics.is_faster(p, mode), timed) for p in ps]
            for name, test, measured in rows:
                if not measured:
                    table.add(scored.model, name, str(k), NOT_MEASURED, "-", "-")
                    continue
                estimate = _estimate(scored, test, k)
                interval = f"{estimate['low']:.1f} to {estimate['high']:.1f}"
                shares = dict.fromkeys(f"{estimate[end]:.1%}" for end in ("share", "share_most"))
                problems = ranged(estimate["problems"], estimate["problems_most"])
                table.add(scored.model, name, str(k), problems, interval, " to ".join(shares))
            for mode in MODES:
                if metrics.is_timed(scored.attempts, mode):
                    mean = metrics.geometric_mean(metrics.log_speedups(scored.attempts, numbers, mode, k))
                    interval = f"{mean.low:.3f} to {mean.high:.3f}"
                    table.add(scored.model, f"geometric mean {mode}", str(k), f"{mean.value:.3f}", interval, "-")
    return table


def verdict_table(models: Sequence[Scored]) -> TextTable:
    """Returns how the samples of each model ended; a column adds up to its number of samples."""
    counts = [metrics.verdicts(scored.attempts) for scored in models]
    table = TextTable(["verdict", *(scored.model for scored in models)], right={scored.model for scored in models})
    for kind in dict.fromkeys(kind for count in counts for kind in count):
        table.add(kind, *(str(count.get(kind, 0)) for count in counts))
    table.add("samples", *(str(len(scored.attempts)) for scored in models))
    return table


def usage_table(models: Sequence[Scored]) -> TextTable:
    """Returns tokens and cost of each model."""
    columns = ["model", "calls", "input tokens", "from cache", "output tokens", "reasoning", "USD", "USD per correct", "hours"]
    table = TextTable(columns, right=set(columns[1:]))
    for scored in models:
        usage, correct = metrics.total_usage(scored.attempts), sum(attempt.correct for attempt in scored.attempts)
        cost = usage.cost_usd
        table.add(
            scored.model,
            *(
                f"{count:,}"
                for count in (usage.calls, usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
            ),
            "-" if cost is None else f"{cost:.2f}",
            "-" if cost is None or not correct else f"{cost / correct:.2f}",
            f"{sum(attempt.seconds for attempt in scored.attempts) / 3600:.2f}",
        )
    return table


def step_table(models: Sequence[Scored]) -> TextTable:
    """Returns, for agents, how many problems one episode is expected to solve within so many steps."""
    curves = [metrics.step_curve(scored.attempts, list(scored.problems), metrics.is_correct) for scored in models]
    table = TextTable(["steps", *(scored.model for scored in models)], right={"steps", *(scored.model for scored in models)})
    for step in range(max(map(len, curves), default=0)):
        table.add(str(step + 1), *(_number(curve[min(step, len(curve) - 1)]) if curve else "-" for curve in curves))
    return table


def problem_table(models: Sequence[Scored]) -> TextTable:
    """Returns one row a problem: how many of its samples are correct, of how many."""
    table = TextTable(["problem", "category", *(scored.model for scored in models)], right={scored.model for scored in models})
    for number, category in models[0].problems.items():
        groups = [[attempt for attempt in scored.attempts if attempt.problem == number] for scored in models]
        cells = (f"{sum(attempt.correct for attempt in group)} of {len(group)}" for group in groups)
        table.add(str(number), category, *cells)
    return table


def comparison_lines(a: Scored, b: Scored, ks: Sequence[int], p: float) -> list[str]:
    """Compares A with B by a paired bootstrap over problems, one line for every metric."""
    lines = []
    for k in ks:
        tests: list[tuple[str, metrics.Test]] = [("correct", metrics.is_correct)]
        tests += [(f"fast_{p:g} {mode}", metrics.is_faster(p, mode)) for mode in MODES if all(_timed(x, mode) for x in (a, b))]
        for name, test in tests:
            comparison = metrics.compare(a.counts(test, k), b.counts(test, k))
            low, high = (f"{100 * value:+.1f}" for value in comparison.difference[1:])
            lines.append(
                f"{name}@{k}: {a.model} minus {b.model} is {100 * comparison.difference.value:+.1f} points [{low}, {high}] over "
                f"{comparison.problems} problems; ahead in {comparison.better:.1%} of resamples"
            )
    return lines


def _timed(scored: Scored, mode: str) -> bool:
    return metrics.is_timed(scored.attempts, mode)


def published_table() -> tuple[str, TextTable]:
    """Figures that others published, with a line that says whose they are and why they are not comparable."""
    data = json.loads(PUBLISHED_FILE.read_text())
    models = data["models"]
    columns = [
        "category (theirs)",
        "problems",
        *(f"{model}: {what}" for model in models for what in ("correct @1 -> @3", "faster @1 -> @3")),
    ]
    table = TextTable(columns, right=set(columns[1:]))
    for category, row in data["categories"].items():
        cells = []
        for model in models:
            figures = row[model]
            cells += [f"{figures[0]} -> {figures[1]}", f"{figures[2]} -> {figures[3]}"]
        table.add(category, str(row["problems"]), *cells)
    return data["label"], table


def ranged(least: float, most: float, to: str = " to ") -> str:
    """Returns both ends of a count, or one number where they are alike."""
    return to.join(dict.fromkeys(map(_number, (least, most))))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 1e-9 else f"{value:.1f}"
