"""Metrics of an author over tasks: pure functions of samples.

Every count is a sum over tasks, so that totals add up to their number. A sample that was not judged counts as wrong, which gives the
least count, or as right, which gives the most: see :func:`solved`. It is never left out of a denominator.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from peerlane.generate.samples import Sample, Task

RESAMPLES = 2000
_SEED = 20_26
_TAIL = 0.025  # on each side
_STEPS = 60  # of bisection: more digits than a float has


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
    """A test of samples: correct; or, with a launch mode, correct and faster than ``p`` times the reference's speed.

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


def solved(groups: Mapping[Task, Sequence[Sample]], metric: Metric, k: int = 1, *, unjudged: bool = False) -> dict[Task, float]:
    """Returns by task the probability that k samples hold one that passes; of fewer samples than k, that all of them hold one.

    ``unjudged``: whether a sample that was not judged counts as one that passes.
    """
    return {
        task: pass_at_k(len(group), sum(metric.passes(item) if item.judged else unjudged for item in group), min(k, len(group)))
        if group
        else 0.0
        for task, group in groups.items()
    }


def share(values: Sequence[float], highest: Sequence[float] | None = None) -> Estimate:
    """Returns the mean of probabilities by problem with its 95 % Clopper-Pearson interval; raises ValueError for none.

    Each problem is one trial, however many samples it has. So the interval is never of no width: 8 of 8 is 1 [0.63, 1]. ``highest``: the
    values if every unjudged sample were right, whose interval gives the upper end.
    """
    if not values:
        raise ValueError("the share of no problems: expected at least one")
    count, sums = len(values), [min(math.fsum(ends), float(len(values))) for ends in (values, highest or values)]
    low, high = binomial_interval(sums[0], count)[0], binomial_interval(sums[1], count)[1]
    return Estimate(sums[0] / count, low, high)


def geometric_mean(logarithms: Sequence[float]) -> Estimate:
    """Returns the geometric mean of the values with these logarithms, one a task, with its interval."""
    value, low, high = mean_with_interval(logarithms)
    return Estimate(math.exp(value), math.exp(low), math.exp(high))


def mean_with_interval(values: Sequence[float]) -> Estimate:
    """Returns the mean and its 95 % interval of Student's t, of no width for a single value; raises ValueError for none."""
    if not values:
        raise ValueError("the mean of no values: expected at least one problem")
    array = np.asarray(values, dtype=np.float64)
    mean, count = float(array.mean()), len(values)
    room = student_t(count - 1) * float(array.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return Estimate(mean, mean - room, mean + room)


class Comparison(NamedTuple):
    """A minus B over the problems that both have: the difference of the means, and the share of resamples in which A is ahead."""

    difference: Estimate
    better: float
    problems: int


def compare(a: Mapping[Task, float], b: Mapping[Task, float]) -> Comparison:
    """Compares two models at the same problems, whose difficulty cancels."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError("the two models have no problem in common")
    differences = np.asarray([a[task] - b[task] for task in shared], dtype=np.float64)
    # the same problems are drawn for equally many differences, in every call
    drawn = np.random.default_rng(_SEED).integers(0, len(shared), size=(RESAMPLES, len(shared)))
    means = differences[drawn].mean(axis=1)
    better = float(np.mean(means > 0) + 0.5 * np.mean(means == 0))
    return Comparison(mean_with_interval(list(differences)), better, len(shared))


def step_curve(samples: Sequence[Sample], tasks: Collection[Task], metric: Metric) -> list[float]:
    """Returns how many tasks one episode solves within 1, 2, ... steps; unjudged samples stay what they are."""
    longest = max((len(sample.steps) for sample in samples), default=0)
    cut = ([sample.after(steps) if sample.judged else sample for sample in samples] for steps in range(1, longest + 1))
    return [sum(solved(by_task(after, tasks), metric).values()) for after in cut]


@functools.lru_cache(maxsize=4096)
def binomial_interval(successes: float, trials: int) -> tuple[float, float]:
    """Returns the Clopper-Pearson interval of a share, for a number of successes that may have a fraction.

    No variable between 0 and 1 spreads wider than a yes or no of the same mean. So the interval holds for means of probabilities too.
    """
    low = _beta_quantile(successes, trials - successes + 1, _TAIL) if successes > 0 else 0.0
    high = _beta_quantile(successes + 1, trials - successes, 1 - _TAIL) if successes < trials else 1.0
    return low, high


@functools.cache
def student_t(freedom: int) -> float:
    """Returns the factor of a 95 % interval of a mean whose spread was estimated with so many degrees of freedom."""
    share = _beta_quantile(freedom / 2, 0.5, 2 * _TAIL)
    return math.sqrt(freedom * (1 - share) / share)


def _beta_quantile(a: float, b: float, probability: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_cdf(a, b, middle) < probability else (low, middle)
    return (low + high) / 2


def _beta_cdf(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction where that converges fast."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_cdf(b, a, 1 - x)
    if x <= 0:
        return 0.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    above, below, value = 1.0, 1 / (1 - (a + b) * x / (a + 1)), 1 / (1 - (a + b) * x / (a + 1))
    for m in range(1, 500):
        before = value
        for step in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            below, above = 1 / (1 + step * below), 1 + step / above
            value *= below * above
        if abs(value - before) <= 1e-15 * abs(value):
            break
    return front * value
