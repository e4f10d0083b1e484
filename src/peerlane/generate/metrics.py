"""Metrics of a model over problems: pure functions of attempts.

Every count is a sum over problems, so that totals add up to their number. A sample that was not judged counts as wrong, which gives the
least count, or as right, which gives the most: see :func:`solved`. It is never left out of a denominator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from peerlane.generate.attempts import Attempt, Usage
from peerlane.generate.intervals import binomial_interval, student_t

RESAMPLES = 2000
_SEED = 20_26

Test = Callable[[Attempt], bool]


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


def is_correct(attempt: Attempt) -> bool:
    """Returns the test of pass@k."""
    return attempt.correct


def is_faster(p: float, mode: str) -> Test:
    """Returns the test of fast_p@k: correct, and the lower end of the speedup's interval in this launch mode is above p."""
    return lambda attempt: attempt.correct and mode in attempt.speedups and attempt.speedups[mode].low > p


def by_problem(attempts: Sequence[Attempt], problems: Sequence[int]) -> dict[int, list[Attempt]]:
    """Returns the attempts at every problem; raises ValueError for attempts at other problems."""
    groups: dict[int, list[Attempt]] = {number: [] for number in problems}
    for attempt in attempts:
        if attempt.problem not in groups:
            raise ValueError(f"an attempt at problem {attempt.problem}, which is not among the {len(groups)} that are counted")
        groups[attempt.problem].append(attempt)
    return groups


def solved(attempts: Sequence[Attempt], problems: Sequence[int], test: Test, k: int, *, unjudged: bool = False) -> dict[int, float]:
    """Returns by problem the probability that k samples hold one that passes; of fewer samples than k, that all of them hold one.

    ``unjudged``: whether a sample that was not judged counts as one that passes.
    """
    return {
        number: pass_at_k(len(group), sum(test(item) if item.judged else unjudged for item in group), min(k, len(group))) if group else 0.0
        for number, group in by_problem(attempts, problems).items()
    }


def needing_multicast(attempts: Sequence[Attempt]) -> int:
    """Counts the attempts that need NVLink multicast, which was off; none of them is correct."""
    return sum(attempt.needs_multicast for attempt in attempts)


def without_multicast(attempts: Sequence[Attempt], problems: Sequence[int]) -> tuple[list[Attempt], list[int]]:
    """Returns the attempts that do not need NVLink multicast, and the problems without those all of whose attempts need it.

    Their shares stand beside those of all attempts. Nothing is ranked by them: anybody can have a failed attempt left out.
    """
    kept = [attempt for attempt in attempts if not attempt.needs_multicast]
    left_out = {attempt.problem for attempt in attempts} - {attempt.problem for attempt in kept}
    return kept, [number for number in problems if number not in left_out]


def is_timed(attempts: Sequence[Attempt], mode: str) -> bool:
    """Tells whether any correct attempt has a speed in this mode. The others then count as not faster; see :func:`untimed`."""
    return any(attempt.correct and mode in attempt.speedups for attempt in attempts)


def untimed(attempts: Sequence[Attempt], mode: str) -> int:
    """Counts the correct attempts without a speed in this mode, such as those of a problem whose reference cannot be captured."""
    return sum(attempt.correct and mode not in attempt.speedups for attempt in attempts)


def log_speedups(attempts: Sequence[Attempt], problems: Sequence[int], mode: str, k: int) -> dict[int, float]:
    """Returns by problem the expected natural logarithm of the best speedup among k samples; the reference is kept where it is not beaten.

    A wrong or slower sample counts as a speedup of 1.
    """

    def gain(attempt: Attempt) -> float:
        return max(0.0, math.log(attempt.speedups[mode].median)) if attempt.correct and mode in attempt.speedups else 0.0

    return {
        number: expected_best([gain(attempt) for attempt in group], min(k, len(group))) if group else 0.0
        for number, group in by_problem(attempts, problems).items()
    }


def timed_log_speedups(attempts: Sequence[Attempt], mode: str) -> dict[int, float]:
    """Returns by problem the mean natural logarithm of the speedups of its correct samples that were timed in this mode, slower ones too.

    Problems without a timed sample are left out.
    """
    logarithms: dict[int, list[float]] = {}
    for attempt in attempts:
        if attempt.correct and mode in attempt.speedups:
            logarithms.setdefault(attempt.problem, []).append(math.log(attempt.speedups[mode].median))
    return {number: sum(found) / len(found) for number, found in sorted(logarithms.items())}


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


def tried(attempts: Sequence[Attempt]) -> list[int]:
    """Returns the problems that have a judged attempt, in order."""
    return sorted({attempt.problem for attempt in attempts if attempt.judged})


def geometric_mean(logarithms: Mapping[int, float]) -> Estimate:
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


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """Compares two models at the same problems, whose difficulty cancels."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError("the two models have no problem in common")
    differences = np.asarray([a[number] - b[number] for number in shared], dtype=np.float64)
    means = _resampled_means(differences)
    better = float(np.mean(means > 0) + 0.5 * np.mean(means == 0))
    return Comparison(mean_with_interval(list(differences)), better, len(shared))


def _resampled_means(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Means of samples with replacement; the same problems are drawn for equally many values, in every call."""
    drawn = np.random.default_rng(_SEED).integers(0, len(values), size=(RESAMPLES, len(values)))
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = values[drawn].mean(axis=1)
    return means


def by_category(values: Mapping[int, float], categories: Mapping[int, str]) -> dict[str, float]:
    """Sums over the problems of every category, in the order in which categories first appear."""
    sums = dict.fromkeys(categories.values(), 0.0)
    for number, value in values.items():
        sums[categories[number]] += value
    return sums


def verdicts(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Counts the attempts that ended in each verdict, the most frequent first; the counts add up to their number."""
    return dict(Counter(attempt.verdict for attempt in attempts).most_common())


def unjudged(attempts: Sequence[Attempt]) -> int:
    """Counts the attempts without a verdict about the model."""
    return sum(not attempt.judged for attempt in attempts)


def mechanisms(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Counts the correct attempts in which each way to move data was seen."""
    return dict(Counter(name for attempt in attempts if attempt.correct for name in attempt.mechanisms).most_common())


def total_usage(attempts: Sequence[Attempt]) -> Usage:
    """Sums tokens, cost and calls of all attempts."""
    return sum((attempt.usage for attempt in attempts), Usage())


def after_steps(attempts: Sequence[Attempt], steps: int) -> list[Attempt]:
    """Returns the attempts as they stood after so many steps of their episodes; unjudged ones stay what they are."""
    return [attempt.after(steps) if attempt.judged else attempt for attempt in attempts]


def step_curve(attempts: Sequence[Attempt], problems: Sequence[int], test: Test) -> list[float]:
    """Returns how many problems one episode solves within 1, 2, ... steps."""
    longest = max((len(attempt.steps) for attempt in attempts), default=0)
    return [sum(solved(after_steps(attempts, steps), problems, test, 1).values()) for steps in range(1, longest + 1)]
