"""Medians with intervals that assume nothing about the distribution, and the paired speedup."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL_95 = 1.96  # standard deviations either way hold 95 % of a normal distribution


@dataclass(frozen=True)
class Interval:
    """A median and the ends of its 95 % interval (for n below 6: the extremes, which then cover less)."""

    median: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the interval's length, relative to the median."""
        return (self.high - self.low) / 2 / self.median

    def __mul__(self, other: Interval) -> Interval:
        """The product of two independent estimates; relative errors add in quadrature on a logarithmic scale."""
        median = self.median * other.median
        up = math.hypot(math.log(self.high / self.median), math.log(other.high / other.median))
        down = math.hypot(math.log(self.median / self.low), math.log(other.median / other.low))
        return Interval(median, median * math.exp(-down), median * math.exp(up), min(self.n, other.n))

    def shrunk(self, spread: float) -> Interval:
        """This estimate of a ratio that is known to lie about 1, with a standard deviation of ``spread``, before anything is measured.

        The mean and interval of the posterior, both normal on a logarithmic scale: a rough estimate is believed less than a good one.
        """
        error = math.log(self.high / self.low) / (2 * _NORMAL_95)
        trust = spread**2 / (spread**2 + error**2)
        median = self.median**trust
        half = _NORMAL_95 * error * math.sqrt(trust)
        return Interval(median, median * math.exp(-half), median * math.exp(half), self.n)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median and its distribution-free interval: order statistics k and n+1-k, where k is the largest for which a Binomial(n, 1/2)
    variable lies in [k, n-k] with at least this confidence (Conover, Practical Nonparametric Statistics, section 3.2)."""
    if not values:
        raise ValueError("the median of no values: expected at least one")
    ordered = sorted(values)
    n = len(ordered)
    k, tail = 0, 0.0
    while 2 * (tail := tail + math.comb(n, k) / 2**n) <= 1 - confidence:
        k += 1
    k = max(k, 1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k], n)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
