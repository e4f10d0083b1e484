"""Groups samples into boards, whose results may be compared, and counts on each what its authors solved."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from peerlane import problems
from peerlane.errors import PeerlaneError
from peerlane.generate import metrics
from peerlane.generate.attempts import Attempt, Usage
from peerlane.generate.judging import MODES
from peerlane.publish.gather import Sample, Standing, Task
from peerlane.report.tiers import LATENCY_US, bound_us, regime
from peerlane.results.identity import NodeClass
from peerlane.results.speed_record import Utilisation

OTHER = "not in this suite"
SWEEP = "sweep"
_KINDS = ("node", "virtual", "cpu", "emulated")
THRESHOLDS = tuple(0.125 * 2 ** (step / 8) for step in range(8 * 7 + 1))
"""Speedups of the fast_p curve: an eighth to 16, eight to a factor of two."""


class BoardKey(NamedTuple):
    """Properties that results on one board share. ``family``: of presets, such as production."""

    node: NodeClass
    track: str
    family: str
    world_size: int
    variant: str
    cases: str
    superseded_protocol: int | None = None
    """version of the timing protocol, where it is not the current one"""


@dataclass(frozen=True)
class Row:
    """One line of a leaderboard. Estimates are shares of the board's tasks, or geometric means of speedups; None: not measured."""

    author: str
    standing: Standing
    samples: int
    unjudged: int
    attempted: int
    pass_at: Mapping[int, metrics.Estimate]
    """with unjudged samples counted as wrong; the interval's upper end counts them as right"""
    pass_most: Mapping[int, float]
    """the shares with unjudged samples counted as right, where that makes a difference"""
    fast: Mapping[str, metrics.Estimate | None]
    mean: Mapping[str, metrics.Estimate | None]
    """geometric mean over the tasks with a timed sample, each by its correct timed samples; slower ones count as what they are"""
    timed: Mapping[str, int]
    """tasks with a timed sample, over which ``mean`` is taken"""
    with_fallback: Mapping[str, metrics.Estimate | None]
    """geometric mean over all tasks of the board, where the reference serves each task that a sample does not solve faster"""
    share: Mapping[str, float | None]
    """median over tasks of the best candidate's share of the roofline bound"""
    untimed: Mapping[str, int]
    """correct samples without a speed in a mode in which others have one"""
    needs_multicast: int
    """samples that need NVLink multicast, which was off"""
    without_multicast: Mapping[int, metrics.Estimate]
    """pass@k of the other samples, over the tasks that have any; empty if that is ``pass_at``. Nothing is ranked by it"""
    usage: Usage


class Cell(NamedTuple):
    """Of one author in one category, expected numbers of tasks solved with one sample. ``faster``: None where not measured."""

    correct: float
    faster: float | None


class Reached(NamedTuple):
    """The share of the roofline bound that someone reached in one launch mode."""

    sample: Sample
    mode: str
    share: float
    bound: Utilisation


class Board:
    """Samples whose results may be compared. Pure figures: nothing here knows of HTML."""

    def __init__(self, key: BoardKey, samples: Sequence[Sample]) -> None:
        self.key = key
        self.samples = [sample for sample in samples if not sample.is_reference]
        self.references = [sample for sample in samples if sample.is_reference]
        self.tasks = sorted({sample.task for sample in self.samples})
        self.authors = list(dict.fromkeys(sample.author for sample in self.samples))
        numbers = {task: number for number, task in enumerate(self.tasks)}
        self._attempts = {
            author: [_renumbered(sample.attempt, numbers[sample.task]) for sample in self.samples if sample.author == author]
            for author in self.authors
        }
        self._categories = {number: category_of(task.problem) for task, number in numbers.items()}
        self.modes = [mode for mode in MODES if any(mode in sample.attempt.speedups for sample in samples)]

    @property
    def title(self) -> str:
        """``pkb, 4 ranks, open track``."""
        key = self.key
        parts = [key.family, f"{key.world_size} rank{'' if key.world_size == 1 else 's'}", f"{key.track} track"]
        parts += [f"variant {key.variant}"] if key.variant != "default" else []
        parts += ["timed case only"] if key.cases == "timed" else []
        return ", ".join(parts + ([f"timing protocol {key.superseded_protocol}"] if key.superseded_protocol else []))

    @property
    def problem_count(self) -> int:
        """The number of problems that anyone tried."""
        return len({task.problem for task in self.tasks})

    @property
    def main_mode(self) -> str | None:
        """The launch mode that ranks: graph where it was measured."""
        return self.modes[-1] if self.modes else None

    @functools.cached_property
    def ks(self) -> list[int]:
        """1, and 3 or the most samples that an author has of a task."""
        most = max((self._samples_a_task(author) for author in self.authors), default=1)
        return sorted({1, min(3, most)})

    def rows(self) -> list[Row]:
        """The leaderboard, the best first: by fast_1 in the main mode, then by pass@1, then by the geometric mean."""
        return sorted(map(self._row, self.authors), key=self._rank, reverse=True)

    def _rank(self, row: Row) -> tuple[float, float, float]:
        fast, mean = (found.get(self.main_mode or "") for found in (row.fast, row.mean))
        return (fast.value if fast else -1.0, row.pass_at[1].value, mean.value if mean else -1.0)

    def _row(self, author: str) -> Row:
        attempts = self._attempts[author]
        standings = {sample.standing for sample in self.samples if sample.author == author}
        numbers = range(len(self.tasks))
        fast: dict[str, metrics.Estimate | None] = dict.fromkeys(self.modes)
        mean: dict[str, metrics.Estimate | None] = dict.fromkeys(self.modes)
        with_fallback: dict[str, metrics.Estimate | None] = dict.fromkeys(self.modes)
        gains = {mode: metrics.timed_log_speedups(attempts, mode) for mode in self.modes}
        for mode in self.modes:
            if gains[mode]:
                fast[mode] = self._share(author, metrics.is_faster(1.0, mode), 1)
                mean[mode] = metrics.geometric_mean(gains[mode])
                with_fallback[mode] = metrics.geometric_mean(metrics.log_speedups(attempts, numbers, mode, 1))
        return Row(
            author=author,
            standing=standings.pop() if len(standings) == 1 else "own",
            samples=len(attempts),
            unjudged=metrics.unjudged(attempts),
            attempted=len({attempt.problem for attempt in attempts}),
            pass_at={k: self._share(author, metrics.is_correct, k) for k in self.ks if k <= self._samples_a_task(author)},
            pass_most=self._pass_most(author),
            fast=fast,
            mean=mean,
            timed={mode: len(found) for mode, found in gains.items()},
            with_fallback=with_fallback,
            share={mode: self._median_share(author, mode) for mode in self.modes},
            needs_multicast=metrics.needing_multicast(attempts),
            without_multicast=self._without_multicast(author),
            untimed={mode: metrics.untimed(attempts, mode) for mode in self.modes if metrics.is_timed(attempts, mode)},
            usage=metrics.total_usage(attempts),
        )

    def _median_share(self, author: str, mode: str) -> float | None:
        shares = [found.share for found in self.reached if found.sample.author == author and found.mode == mode]
        return statistics.median(shares) if shares else None

    def _samples_a_task(self, author: str) -> int:
        return max(Counter(attempt.problem for attempt in self._attempts[author]).values())

    def _solved(self, author: str, test: metrics.Test, k: int = 1) -> dict[int, float]:
        return metrics.solved(self._attempts[author], range(len(self.tasks)), test, k)

    def _solved_at_most(self, author: str, test: metrics.Test, k: int = 1) -> dict[int, float]:
        return metrics.solved(self._attempts[author], range(len(self.tasks)), test, k, unjudged=True)

    def _pass_most(self, author: str) -> dict[int, float]:
        if not metrics.unjudged(self._attempts[author]):
            return {}
        ks = [k for k in self.ks if k <= self._samples_a_task(author)]
        return {k: sum(self._solved_at_most(author, metrics.is_correct, k).values()) / len(self.tasks) for k in ks}

    def _without_multicast(self, author: str) -> dict[int, metrics.Estimate]:
        attempts, numbers = metrics.without_multicast(self._attempts[author], range(len(self.tasks)))
        if len(attempts) == len(self._attempts[author]) or not numbers:
            return {}
        most = max(Counter(attempt.problem for attempt in attempts).values(), default=1)
        found = {k: metrics.solved(attempts, numbers, metrics.is_correct, k) for k in self.ks if k <= most}
        return {k: metrics.share(list(values.values())) for k, values in found.items()}

    def _share(self, author: str, test: metrics.Test, k: int) -> metrics.Estimate:
        return metrics.share(*(list(found(author, test, k).values()) for found in (self._solved, self._solved_at_most)))

    def heat(self) -> dict[str, tuple[int, dict[str, Cell]]]:
        """By category: its number of tasks, and a cell for each author."""
        return {**self._heat(self._categories), **self._heat(dict.fromkeys(self._categories, "total"))}

    def kinds(self) -> dict[str, tuple[int, dict[str, Cell]]]:
        """The same for tasks that latency bounds, and for the others; without tasks whose roofline is not known here."""
        names = {"latency": f"bound below {LATENCY_US:g} us (latency)", "bandwidth": "bound by bandwidth or compute"}
        kinds = {}
        for number, task in enumerate(self.tasks):
            with contextlib.suppress(PeerlaneError):
                kinds[number] = names[regime(bound_us(problems.get(task.problem), task.preset, self.key.world_size))]
        return self._heat(kinds)

    def _heat(self, groups: Mapping[int, str]) -> dict[str, tuple[int, dict[str, Cell]]]:
        """By group of tasks: its number of tasks, and a cell for each author."""
        sizes = metrics.by_category(dict.fromkeys(groups, 1.0), groups)
        found: dict[str, tuple[int, dict[str, Cell]]] = {category: (int(size), {}) for category, size in sorted(sizes.items())}
        for author in self.authors:
            correct = metrics.by_category(self._of(groups, author, metrics.is_correct), groups)
            mode = self.main_mode
            timed = mode is not None and metrics.is_timed(self._attempts[author], mode)
            faster = metrics.by_category(self._of(groups, author, metrics.is_faster(1.0, mode)), groups) if mode and timed else {}
            for category, value in correct.items():
                found[category][1][author] = Cell(value, faster.get(category))
        return found

    def _of(self, groups: Mapping[int, str], author: str, test: metrics.Test) -> dict[int, float]:
        return {number: value for number, value in self._solved(author, test).items() if number in groups}

    def fast_p(self) -> list[dict[str, Any]]:
        """Points of the fast_p curves: the expected share of tasks with a speedup above p.

        Correct samples that were not timed count as slow. ``most`` is the share without them, and without tasks that have no others.
        """
        found: list[dict[str, Any]] = []
        for author in self.authors:
            for mode in self.modes:
                attempts = self._attempts[author]
                timed = [item for item in attempts if mode in item.speedups or not item.correct]
                left_out = {item.problem for item in attempts} - {item.problem for item in timed}
                numbers = [number for number in range(len(self.tasks)) if number not in left_out]
                for p in THRESHOLDS if metrics.is_timed(attempts, mode) else ():
                    test = metrics.is_faster(p, mode)
                    share = sum(self._solved(author, test).values()) / len(self.tasks)
                    most = max(share, sum(metrics.solved(timed, numbers, test, 1).values()) / len(numbers))
                    untimed = metrics.untimed(attempts, mode)
                    found.append({"author": author, "mode": mode, "p": p, "share": share, "most": most, "untimed": untimed})
        return found

    def verdicts(self) -> list[dict[str, Any]]:
        """Counts the samples of each author by verdict."""
        return [
            {"author": author, "verdict": verdict, "n": count}
            for author in self.authors
            for verdict, count in metrics.verdicts(self._attempts[author]).items()
        ]

    def mechanisms(self) -> list[dict[str, Any]]:
        """In how many correct samples of each author there is evidence for each mechanism, by its confidence."""
        counts = Counter(
            (sample.author, item.name, item.confidence)
            for sample in self.samples
            if sample.result is not None and sample.attempt.correct
            for item in sample.result.mechanisms
        )
        return [{"author": who, "mechanism": name, "confidence": sure, "n": n} for (who, name, sure), n in sorted(counts.items())]

    @functools.cached_property
    def reached(self) -> list[Reached]:
        """Of every task, launch mode and author the best candidate's share of the roofline; and the reference's, by itself or beside it."""
        best: dict[tuple[Task, str, str], Reached] = {}
        for sample in [*self.references, *self.samples]:
            for mode in self.modes if sample.result is not None else ():
                speed = sample.result.speed_in(mode) if sample.result is not None else None
                bound = None if speed is None else measured_bound(speed.utilisation)
                if bound is None:
                    continue
                found = Reached(sample, mode, bound.candidate, bound)
                key = (sample.task, mode, sample.author)
                if key not in best or best[key].share < found.share:
                    best[key] = found
        return list(best.values())

    def steps(self) -> list[dict[str, Any]]:
        """Of agents, the expected share of tasks solved after so many steps."""
        numbers = range(len(self.tasks))
        found: list[dict[str, Any]] = []
        tests: dict[str, metrics.Test] = {"correct": metrics.is_correct}
        timed = {mode for sample in self.samples for step in sample.attempt.steps for mode in step.speedups}
        tests |= {f"faster, {mode}": metrics.is_faster(1.0, mode) for mode in self.modes if mode in timed}
        for author in self.authors:
            for what, test in tests.items():
                curve = metrics.step_curve(self._attempts[author], numbers, test)
                found += [
                    {"author": author, "what": what, "step": step, "share": value / len(self.tasks)} for step, value in enumerate(curve, 1)
                ]
        return found


def _renumbered(attempt: Attempt, number: int) -> Attempt:
    """The attempt and its steps, counted under a task's number."""
    return replace(attempt, problem=number, steps=tuple(replace(step, problem=number) for step in attempt.steps))


def measured_bound(utilisation: Sequence[Utilisation]) -> Utilisation | None:
    """Against the measured ceilings where there are some, else against the datasheet; None of none, or without a bound."""
    found = next((item for item in utilisation if item.ceilings == "measured"), *utilisation[:1]) if utilisation else None
    return found if found is not None and found.bound_us > 0 else None


def boards(samples: Iterable[Sample]) -> list[Board]:
    """A board for each class of machine and setting: nodes before virtual nodes and ranks without GPUs; of those the broadest first."""
    groups: dict[BoardKey, list[Sample]] = {}
    for sample in samples:
        like = sample.like
        family = like.preset.split("_")[0]
        key = BoardKey(like.node, like.track, family, like.world_size, like.problem.variant, like.cases, like.superseded_protocol)
        groups.setdefault(key, []).append(sample)
    found = [Board(key, group) for key, group in groups.items()]
    most = {key.node: max(board.problem_count for board in found if board.key.node == key.node) for key in groups}

    def rank(board: Board) -> tuple[int, int, str, bool, bool, int, int]:
        node, older = board.key.node, board.key.superseded_protocol is not None
        return _KINDS.index(node.kind), -most[node], str(node), older, board.key.family == SWEEP, -board.problem_count, -len(board.samples)

    return sorted(found, key=rank)


@functools.cache
def category_of(problem: int) -> str:
    """The category of a problem's number."""
    return categories().get(problem, OTHER)


@functools.cache
def categories() -> Mapping[int, str]:
    """Number -> category of all problems that are known here."""
    return {item.id: item.category for item in problems.all_problems(None)}
