"""Metrics of an author over tasks: pure functions of samples.

Every count is a sum over tasks, so that totals add up to their number. A sample that was not judged counts as wrong, which gives the
least count, or as right, which gives the most: see :func:`solved`. It is never left out of a denominator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from peerlane.generate.intervals import binomial_interval, student_t
from peerlane.generate.samples import Sample, Task, Usage

RESAMPLES = 2000
_SEED = 20_26


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the probability that at least one of k samples, drawn without replacement from these, is correct.

    Unbiased for the model's pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples: expected 0 <= correct <= samples and 1 <= k <= samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def expected_best(values: Sequence[float], k: int) -> float:
    """Returns the mean of the largest of k values drawn without replacement from these; raises ValueError unless 1 <= k <= len(values)."""
    if not 1 <= k <= len(values):
        raise ValueError(f"the best of {k} among {len(values)} values: expected 1 <= k <= number of values")
    whole = math.comb(len(values), k)
    return sum(value * math.comb(index, k - 1) / whole for index, value in enumerate(sorted(values)))


class Metric(NamedTuple):
    """What a sample must be to count: correct; or, in a launch mode, correct and faster than ``p`` times the reference's speed.

    The lower end of the speedup's interval counts.
    """

    mode: str = ""
    p: float = 0.0

    @property
    def name(self) -> str:
        """``correct``, or ``fast_1 graph``."""
        return f"fast_{self.p:g} {self.mode}" if self.mode else "correct"

    def passes(self, sample: Sample) -> bool:
        """Tells whether the sample counts."""
        return sample.correct and (not self.mode or (self.mode in sample.speedups and sample.speedups[self.mode].low > self.p))


CORRECT = Metric()


def by_task(samples: Sequence[Sample], tasks: Collection[Task]) -> dict[Task, list[Sample]]:
    """Returns the samples of every task; raises ValueError for samples of other tasks."""
    groups: dict[Task, list[Sample]] = {task: [] for task in tasks}
    for sample in samples:
        if sample.task not in groups:
            raise ValueError(f"a sample of problem {sample.problem}, which is not among the {len(groups)} that are counted")
        groups[sample.task].append(sample)
    return groups


def solved(samples: Sequence[Sample], tasks: Collection[Task], metric: Metric, k: int = 1, *, unjudged: bool = False) -> dict[Task, float]:
    """Returns by task the probability that k samples hold one that passes; of fewer samples than k, that all of them hold one.

    ``unjudged``: whether a sample that was not judged counts as one that passes.
    """
    return {
        task: pass_at_k(len(group), sum(metric.passes(item) if item.judged else unjudged for item in group), min(k, len(group)))
        if group
        else 0.0
        for task, group in by_task(samples, tasks).items()
    }


def needing_multicast(samples: Sequence[Sample]) -> int:
    """Counts the samples that need NVLink multicast, which was off; none of them is correct."""
    return sum(sample.needs_multicast for sample in samples)


def without_multicast(samples: Sequence[Sample], tasks: Collection[Task]) -> tuple[list[Sample], list[Task]]:
    """Returns the samples that do not need NVLink multicast, and the tasks without those all of whose samples need it.

    Their shares stand beside those of all samples. Nothing is ranked by them: anybody can have a failed sample left out.
    """
    others = [sample for sample in samples if not sample.needs_multicast]
    left_out = {sample.task for sample in samples} - {sample.task for sample in others}
    return others, [task for task in tasks if task not in left_out]


def is_timed(samples: Sequence[Sample], mode: str) -> bool:
    """Tells whether any correct sample has a speed in this mode. The others then count as not faster; see :func:`untimed`."""
    return any(sample.correct and mode in sample.speedups for sample in samples)


def untimed(samples: Sequence[Sample], mode: str) -> int:
    """Counts the correct samples without a speed in this mode, such as those of a problem whose reference cannot be captured."""
    return sum(sample.correct and mode not in sample.speedups for sample in samples)


def log_speedups(samples: Sequence[Sample], tasks: Collection[Task], mode: str, k: int) -> dict[Task, float]:
    """Returns by task the expected natural logarithm of the best speedup among k samples; the reference serves where it is not beaten.

    A wrong or slower sample counts as a speedup of 1.
    """

    def gain(sample: Sample) -> float:
        return max(0.0, math.log(sample.speedups[mode].median)) if sample.correct and mode in sample.speedups else 0.0

    return {
        task: expected_best([gain(sample) for sample in group], min(k, len(group))) if group else 0.0
        for task, group in by_task(samples, tasks).items()
    }


def timed_log_speedups(samples: Sequence[Sample], mode: str) -> dict[Task, float]:
    """Returns by task the mean natural logarithm of the speedups of its correct samples that were timed in this mode, slower ones too.

    Tasks without a timed sample are left out.
    """
    logarithms: dict[Task, list[float]] = {}
    for sample in samples:
        if sample.correct and mode in sample.speedups:
            logarithms.setdefault(sample.task, []).append(math.log(sample.speedups[mode].median))
    return {task: sum(values) / len(values) for task, values in sorted(logarithms.items())}


def share(values: Sequence[float], most: Sequence[float] | None = None) -> Estimate:
    """Returns the mean of probabilities by problem with its 95 % Clopper-Pearson interval; raises ValueError for none.

    Each problem is one trial, however many samples it has. So the interval is never of no width: 8 of 8 is 1 [0.63, 1]. ``most``: the
    values if every unjudged sample were right, whose interval gives the upper end.
    """
    if not values:
        raise ValueError("the share of no problems: expected at least one")
    count, sums = len(values), [min(math.fsum(ends), float(len(values))) for ends in (values, most or values)]
    low, high = binomial_interval(sums[0], count)[0], binomial_interval(sums[1], count)[1]
    return Estimate(sums[0] / count, low, high)


def tried(samples: Sequence[Sample]) -> list[Task]:
    """Returns the tasks that have a judged sample, in order."""
    return sorted({sample.task for sample in samples if sample.judged})


def geometric_mean(logarithms: Mapping[Task, float]) -> Estimate:
    """Returns the geometric mean over problems of the values with these logarithms, with its interval."""
    value, low, high = mean_with_interval(list(logarithms.values()))
    return Estimate(math.exp(value), math.exp(low), math.exp(high))


def mean_with_interval(values: Sequence[float]) -> Estimate:
    """Returns the mean and its 95 % interval of Student's t, of no width for a single value; raises ValueError for none."""
    if not values:
        raise ValueError("the mean of no values: expected at least one problem")
    found = np.asarray(values, dtype=np.float64)
    mean, count = float(found.mean()), len(values)
    room = student_t(count - 1) * float(found.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return Estimate(mean, mean - room, mean + room)


@dataclass(frozen=True)
class Comparison:
    """A minus B, per problem, over the problems that both have.

    Attributes:
        difference: of the means, with its interval.
        better: the share of resamples in which A is ahead; 0.5 means no difference can be told.
        problems: how many were compared.
    """

    difference: Estimate
    better: float
    problems: int


def compare(a: Mapping[Task, float], b: Mapping[Task, float]) -> Comparison:
    """Compares two models at the same problems, whose difficulty cancels."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError("the two models have no problem in common")
    differences = np.asarray([a[task] - b[task] for task in shared], dtype=np.float64)
    means = _resampled_means(differences)
    better = float(np.mean(means > 0) + 0.5 * np.mean(means == 0))
    return Comparison(mean_with_interval(list(differences)), better, len(shared))


def _resampled_means(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Means of samples with replacement; the same problems are drawn for equally many values, in every call."""
    drawn = np.random.default_rng(_SEED).integers(0, len(values), size=(RESAMPLES, len(values)))
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = values[drawn].mean(axis=1)
    return means


def verdicts(samples: Sequence[Sample]) -> dict[str, int]:
    """Counts the samples that ended in each verdict, the most frequent first; the counts add up to their number."""
    return dict(Counter(sample.verdict for sample in samples).most_common())


def unjudged(samples: Sequence[Sample]) -> int:
    """Counts the samples without a verdict about the model."""
    return sum(not sample.judged for sample in samples)


def mechanisms(samples: Sequence[Sample]) -> dict[str, int]:
    """Counts the correct samples in which each way to move data was seen."""
    return dict(Counter(name for sample in samples if sample.correct for name in sample.mechanisms).most_common())


def total_usage(samples: Sequence[Sample]) -> Usage:
    """Sums tokens, cost and calls of all samples."""
    return sum((sample.usage for sample in samples), Usage())


def step_curve(samples: Sequence[Sample], tasks: Collection[Task], metric: Metric) -> list[float]:
    """Returns how many tasks one episode solves within 1, 2, ... steps; unjudged samples stay what they are."""
    longest = max((len(sample.steps) for sample in samples), default=0)
    cut = ([sample.after(steps) if sample.judged else sample for sample in samples] for steps in range(1, longest + 1))
    return [sum(solved(after, tasks, metric).values()) for after in cut]
