"""The median's bootstrap interval."""

import numpy as np

from peerlane.evaluate.timing.scoring import median_interval
from peerlane.results.speed_record import Estimate


def test_the_interval_holds_the_true_median_in_about_95_of_100_samples() -> None:
    generator = np.random.default_rng(1)
    intervals = [median_interval(generator.lognormal(0.0, 0.1, 25).tolist()) for _ in range(300)]
    assert 0.9 <= sum(item.low <= 1.0 <= item.high for item in intervals) / 300 <= 0.99


def test_outliers_move_nothing_and_scaling_scales() -> None:
    values = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 40.0, 50.0]
    found = median_interval(values)
    assert found.median == 1.0 and found.low <= 1.0 and found.n == 9
    assert found.scaled(2.0) == Estimate(median=2.0, low=2 * found.low, high=2 * found.high, n=9)
    assert median_interval([3.0] * 4).half_width == 0.0
