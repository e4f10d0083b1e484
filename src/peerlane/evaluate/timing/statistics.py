"""Medians with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peerlane.evaluate.results.speed_record import Estimate

_RESAMPLES = 1000


def median_interval(values: Sequence[float]) -> Estimate:
    """The median, with a percentile bootstrap over the values (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13)."""
    if not values:
        raise ValueError("the median of no values: expected at least one")
    data = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(data), size=(_RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[drawn], axis=1), [0.025, 0.975])
    middle = float(np.median(data))
    return Estimate(median=middle, low=min(middle, float(low)), high=max(middle, float(high)), n=len(data))
