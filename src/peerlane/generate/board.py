"""The board: samples whose results may be compared, and the figures of its authors. Terminals, pages, CSV, LaTeX and JSON show it."""

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from peerlane import problems
from peerlane.errors import PeerlaneError
from peerlane.generate import metrics
from peerlane.generate.metrics import CORRECT, Estimate, Metric
from peerlane.generate.samples import MODES, Sample, Setting, Standing, Task, Usage
from peerlane.report.tiers import bound_us, regime, tiers

PUBLISHED_FILE = Path(__file__).with_name("published.json")
OTHER = "not in this suite"
SWEEP = "sweep"
_KINDS = ("node", "virtual", "cpu", "emulated")


class Count(NamedTuple):
    """Tasks that are expected to be solved: with unjudged samples wrong (``solved``) and right (``most``); the share has both ends."""

    tasks: int
    solved: float
    most: float
    share: Estimate


class Entry:
    """The samples of one author at the tasks of a board.

    Attributes:
        modes: launch modes in which a correct sample has a speed. Other correct samples then count as not faster.
        unjudged: samples without a verdict about the author.
        needs_multicast: samples that need NVLink multicast, which was off; none of them is correct.
        verdicts: the number of samples by verdict, the most frequent first.
        mechanisms: in how many correct samples each way to move data was seen.
        seconds: wall time of all replies or episodes.
        samples_per_task: samples of the task that has the most, judged or not.
        steps: how many tasks one episode of an agent solves within 1, 2, ... steps.
    """

    def __init__(self, author: str, samples: Sequence[Sample], tasks: Collection[Task]) -> None:
        self.author, self.samples, self.tasks = author, samples, tasks
        self.groups = metrics.by_task(samples, tasks)
        correct = [sample for sample in samples if sample.correct]
        self.correct, self.unjudged = len(correct), sum(not sample.judged for sample in samples)
        self.needs_multicast = sum(sample.needs_multicast for sample in samples)
        self.attempted = {sample.task for sample in samples}
        self.tried = {sample.task for sample in samples if sample.judged}
        self.modes = [mode for mode in MODES if any(mode in sample.speedups for sample in correct)]
        self.untimed = {mode: sum(mode not in sample.speedups for sample in correct) for mode in self.modes}
        self.verdicts = dict(Counter(sample.verdict for sample in samples).most_common())
        self.mechanisms = dict(Counter(name for sample in correct for name in sample.mechanisms).most_common())
        self.usage = sum((sample.usage for sample in samples), Usage())
        self.seconds = sum(sample.seconds for sample in samples)
        self.samples_per_task = max(map(len, self.groups.values()), default=0)
        self.steps = metrics.step_curve(samples, tasks, CORRECT)
        standings = {sample.standing for sample in samples}
        self.standing: Standing = standings.pop() if len(standings) == 1 else "own"
        self._solved: dict[tuple[Metric, int], tuple[dict[Task, float], dict[Task, float]]] = {}

    def metrics(self, ps: Iterable[float]) -> list[Metric]:
        """Returns correctness, and what was measured of speed."""
        return [CORRECT, *(Metric(mode, p) for mode in self.modes for p in ps)]

    def usable(self, ks: Iterable[int]) -> list[int]:
        """Returns those numbers of samples that the author has."""
        return [k for k in ks if k <= max(self.samples_per_task, 1)]

    def solved(self, metric: Metric, k: int = 1) -> tuple[dict[Task, float], dict[Task, float]]:
        """Returns by task the probability that k samples hold one that passes, with unjudged samples wrong, and with them right."""
        if (metric, k) not in self._solved:
            low, high = (metrics.solved(self.groups, metric, k, unjudged=unjudged) for unjudged in (False, True))
            self._solved[metric, k] = low, high
        return self._solved[metric, k]

    def count(self, metric: Metric = CORRECT, k: int = 1, tasks: Collection[Task] | None = None) -> Count:
        """Counts these tasks, by default all; raises ValueError for none."""
        low, high = ([by_task[task] for task in (self.tasks if tasks is None else tasks)] for by_task in self.solved(metric, k))
        return Count(len(low), sum(low), sum(high), metrics.share(low, high))

    def geometric_mean(self, mode: str, k: int = 1) -> Estimate:
        """Returns the geometric mean over all tasks of the expected best speedup among k samples.

        A sample that is wrong or slower, or was not timed, counts as 1: the reference serves there.
        """

        def gain(sample: Sample) -> float:
            return max(0.0, math.log(sample.speedups[mode].median)) if sample.correct and mode in sample.speedups else 0.0

        gains = {task: list(map(gain, group)) for task, group in self.groups.items()}
        return metrics.geometric_mean([metrics.expected_best(values, min(k, len(values))) if values else 0.0 for values in gains.values()])

    def timed(self, mode: str) -> dict[Task, float]:
        """Returns by task the mean logarithm of its timed speedups, slower ones too. Tasks without one are left out."""
        logarithms = {
            task: [math.log(sample.speedups[mode].median) for sample in group if sample.correct and mode in sample.speedups]
            for task, group in self.groups.items()
        }
        return {task: sum(values) / len(values) for task, values in logarithms.items() if values}

    @functools.cached_property
    def without_multicast(self) -> "Entry":
        """The same without the samples that need NVLink multicast, and without tasks all of whose samples do.

        Nothing is ranked by it: anybody can have a failed sample left out.
        """
        others = [sample for sample in self.samples if not sample.needs_multicast]
        left_out = self.attempted - {sample.task for sample in others}
        return Entry(f"{self.author}, without multicast", others, [task for task in self.tasks if task not in left_out])


class Board:
    """Samples whose results may be compared, and the tasks that count for every author, each with its category.

    Args:
        key: what the results have in common; ``preset`` may name a family, such as production. None where nothing was judged.
        tasks: by default those that anyone tried.
        authors: by default those of the samples, in their order.
    """

    def __init__(
        self, key: Setting | None, samples: Sequence[Sample], tasks: Mapping[Task, str] | None = None, authors: Iterable[str] = ()
    ) -> None:
        self.key = key
        self.samples = [sample for sample in samples if not sample.is_reference and (tasks is None or sample.task in tasks)]
        self.references = [sample for sample in samples if sample.is_reference]
        if tasks is None:
            tasks = {task: category_of(task.problem) for task in sorted({sample.task for sample in self.samples})}
        self.tasks = tasks
        by_author: dict[str, list[Sample]] = {author: [] for author in authors}
        for sample in self.samples:
            by_author.setdefault(sample.author, []).append(sample)
        self.entries = [Entry(author, group, list(self.tasks)) for author, group in by_author.items()]
        self.modes = [mode for mode in MODES if any(mode in sample.speedups for sample in samples)]

    @property
    def setting(self) -> Setting:
        """The key of a board of results."""
        assert self.key is not None
        return self.key

    @property
    def title(self) -> str:
        """``pkb, 4 ranks, open track``."""
        key = self.setting
        parts = [key.preset, f"{key.world_size} rank{'' if key.world_size == 1 else 's'}", f"{key.track} track"]
        parts += [f"variant {key.variant}"] if key.variant != "default" else []
        parts += ["timed case only"] if key.cases == "timed" else []
        return ", ".join(parts + ([f"timing protocol {key.other_protocol}"] if key.other_protocol else []))

    @property
    def main_mode(self) -> str | None:
        """The launch mode that ranks: graph where it was measured."""
        return self.modes[-1] if self.modes else None

    @functools.cached_property
    def ks(self) -> list[int]:
        """1, and 3 or the most samples that an author has of a task."""
        return sorted({1, min(3, max((entry.samples_per_task for entry in self.entries), default=1))})

    def ranked(self) -> list[Entry]:
        """Returns the entries, the best first: by fast_1 in the main mode, then by pass@1, then by the mean of timed speedups."""
        mode = self.main_mode or ""

        def rank(entry: Entry) -> tuple[float, float, float]:
            is_timed = mode in entry.modes
            fast = entry.count(Metric(mode, 1.0)).share.value if is_timed else -1.0
            return fast, entry.count().share.value, metrics.geometric_mean(list(entry.timed(mode).values())).value if is_timed else -1.0

        return sorted(self.entries, key=rank, reverse=True)

    @functools.cached_property
    def categories(self) -> dict[str, list[Task]]:
        """Each category with its tasks, in the order of the tasks, and ``total`` with all."""
        return {**_grouped(self.tasks), "total": list(self.tasks)}

    @functools.cached_property
    def bounds(self) -> dict[str, list[Task]]:
        """Tasks by what bounds them: ``latency`` (a roofline below 20 us) or ``bandwidth``; without those whose roofline is not known."""
        kinds: dict[Task, str] = {}
        for task in self.tasks if self.key is not None else ():
            with contextlib.suppress(PeerlaneError):
                kinds[task] = regime(bound_us(problems.get(task.problem), task.preset, self.setting.world_size))
        return dict(sorted(_grouped(kinds).items()))

    @functools.cached_property
    def tiers(self) -> dict[str, list[Task]]:
        """Tasks at problems of the suite by tier of difficulty, easy ones first, see :mod:`peerlane.report.tiers`."""
        by_problem = tiers()
        groups = _grouped({task: by_problem[task.problem] for task in self.tasks if task.problem in by_problem})
        return {name: groups[name] for name in ("easy", "medium", "hard") if name in groups}


def _grouped(names: Mapping[Task, str]) -> dict[str, list[Task]]:
    groups: dict[str, list[Task]] = {}
    for task, name in names.items():
        groups.setdefault(name, []).append(task)
    return groups


def boards(samples: Iterable[Sample]) -> list[Board]:
    """Returns a board for each class of machine and setting: nodes before virtual nodes and ranks without GPUs, then the broadest first."""
    groups: dict[Setting, list[Sample]] = {}
    for sample in samples:
        assert sample.setting is not None
        groups.setdefault(replace(sample.setting, preset=sample.setting.preset.split("_")[0]), []).append(sample)
    unsorted = [Board(key, group) for key, group in groups.items()]
    sizes = {id(board): len({task.problem for task in board.tasks}) for board in unsorted}
    largest = {key.node_class: max(sizes[id(board)] for board in unsorted if board.setting.node_class == key.node_class) for key in groups}

    def rank(board: Board) -> tuple[int, int, str, bool, bool, int, int]:
        key, size = board.setting, sizes[id(board)]
        node, older = key.node_class, key.other_protocol is not None
        return _KINDS.index(node.kind), -largest[node], str(node), older, key.preset == SWEEP, -size, -len(board.samples)

    return sorted(unsorted, key=rank)


def category_of(problem: int) -> str:
    """Returns the category of a problem's number."""
    return _categories().get(problem, OTHER)


@functools.cache
def _categories() -> Mapping[int, str]:
    return {item.id: item.category for item in problems.all_problems(None)}


def public_categories() -> dict[str, str]:
    """Returns by category its name in the public benchmark, with the number of problems that its authors count there."""
    data = json.loads(PUBLISHED_FILE.read_text())
    return {ours: f"{theirs}: {data['categories'][theirs]['problems']}" for ours, theirs in data["ours"].items()}
