"""Medians with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A median of ``n`` values, and the ends of its 95 % confidence interval."""

    median: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the interval's length, relative to the median."""
        return (self.high - self.low) / 2 / self.median

    def scaled(self, factor: float) -> Interval:
        """This many times as much."""
        return Interval(self.median * factor, self.low * factor, self.high * factor, self.n)


def median_interval(values: Sequence[float]) -> Interval:
    """The median, with a percentile bootstrap over the values (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13)."""
    if not values:
        raise ValueError("the median of no values: expected at least one")
    data = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(data), size=(_RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[drawn], axis=1), [0.025, 0.975])
    middle = float(np.median(data))
    return Interval(middle, min(middle, float(low)), max(middle, float(high)), len(data))
