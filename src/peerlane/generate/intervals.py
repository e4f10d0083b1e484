"""95 % intervals that cover at least as often as they claim, from three problems on; pure functions of numbers."""

from __future__ import annotations

import functools
import math

_TAIL = 0.025  # on each side
_STEPS = 60  # of bisection: more digits than a float has


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
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            below, above = 1 / (1 + step * below), 1 + step / above
            value *= below * above
        if abs(value - before) <= 1e-15 * abs(value):
            break
    return front * value
