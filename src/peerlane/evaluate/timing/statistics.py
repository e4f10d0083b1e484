"""Medians and quantiles with intervals that assume nothing about the distribution, and the speedup as their product."""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 200
_USUAL_DEPTH = 1.5  # a resample's quantile lies below the sample's of so many times the share
_NORMAL_95 = 1.96  # standard deviations either way hold 95 % of a normal distribution


@dataclass(frozen=True)
class Interval:
    """A median, or another estimate, and the ends of its 95 % interval (of a median for n below 6: the extremes, which then cover less)."""

    median: float
    low: float
    high: float
    n: int

    @staticmethod
    def about_one(spread: float) -> Interval:
        """A ratio of which only this is known: it lies about 1, with a standard deviation of ``spread``."""
        return Interval(1.0, math.exp(-_NORMAL_95 * spread), math.exp(_NORMAL_95 * spread), sys.maxsize)

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

    def scaled(self, factor: float) -> Interval:
        """This many times as much."""
        return Interval(self.median * factor, self.low * factor, self.high * factor, self.n)

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


def paired_interval(values: Sequence[float], over: Sequence[float]) -> Interval:
    """The ratio of paired positive values: the Hodges-Lehmann estimate, on a logarithmic scale, of what pairs have in common.

    It is the median of the means of all two pairs, each with itself too. Of pairs that deviate normally it needs two thirds of those that
    their own median does, for the same accuracy. The interval is that of the signed-rank statistic, for pairs that deviate to either side
    alike (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, sections 3.2 and 3.3); with fewer than 6 pairs it has the
    extremes for ends.
    """
    logs = np.log(np.divide(values, over, dtype=float))
    first, second = np.triu_indices(len(logs))
    means = np.sort((logs[first] + logs[second]) / 2)
    outside = _signed_ranks_outside(len(logs))
    low, middle, high = np.exp([means[outside], np.median(means), means[-1 - outside]])
    return Interval(float(middle), float(low), float(high), len(logs))


@functools.cache
def _signed_ranks_outside(n: int) -> int:
    """How many of the ordered means of two pairs lie below their 95 % interval: the largest sum that the ranks 1 to n, each counted with
    probability 1/2, do not exceed in 2.5 % of all cases or less."""
    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, n + 1):
        ways[rank:] = ways[rank:] + ways[:-rank]
        ways /= 2
    return max(0, int(np.searchsorted(np.cumsum(ways), 0.025, side="right")) - 1)


def pooled_interval(
    groups: Sequence[Sequence[float]], shares: tuple[float, float], over: Sequence[Sequence[float]] | None = None
) -> Interval:
    """The mean of the values between two quantiles of all groups together, or its ratio to that of the groups ``over``.

    The interval is a percentile bootstrap over groups, whose values are alike (Davison and Hinkley, Bootstrap Methods and their
    Application, section 3.8); groups at the same place of ``groups`` and ``over`` stay together.
    """
    count = len(groups)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    times = np.vstack([np.ones(count, dtype=drawn.dtype), drawn])  # how often each group is in a sample; first the sample itself
    means = _pooled_means(groups, times, shares)
    if over is not None:
        means = means / _pooled_means(over, times, shares)
    low, high = np.quantile(means[1:], [0.025, 0.975])
    middle = float(means[0])
    return Interval(middle, min(middle, float(low)), max(middle, float(high)), count)


def mean_between(values: Sequence[float], shares: tuple[float, float]) -> float:
    """The mean of the values between two quantiles; of a value at a quantile the part counts that lies between them."""
    return float(_pooled_means([values], np.ones((1, 1), dtype=int), shares)[0])


def _pooled_means(groups: Sequence[Sequence[float]], times: np.ndarray, shares: tuple[float, float]) -> np.ndarray:
    """For every row of ``times``, which says how often each group is there, the mean of the groups' values between two quantiles. Of a
    value at a quantile the part counts that lies between them."""
    values = np.concatenate([np.asarray(group) for group in groups])
    sizes = np.array([len(group) for group in groups])
    order = np.argsort(values)
    owner = np.repeat(np.arange(len(groups)), sizes)[order]
    first, last = (share * (times @ sizes)[:, None] for share in shares)
    depth = min(len(values), math.ceil(_USUAL_DEPTH * shares[1] * len(values)))  # of the smallest values; nearly always enough
    while True:
        reached = np.cumsum(times[:, owner[:depth]], axis=1, dtype=np.int32)
        if depth == len(values) or (reached[:, -1:] >= last).all():
            counted = np.diff(np.clip(reached, first, last), axis=1, prepend=first)
            return np.asarray(counted @ values[order][:depth] / (last - first)[:, 0])
        depth = len(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
