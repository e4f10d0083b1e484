"""Medians, their intervals, and the size of a block."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerlane.evaluate.speed import choose_slots
from peerlane.evaluate.statistics import Interval, _pooled_quantiles, median_interval, pooled_interval, quantile
from peerlane.settings import TimingRules

times = st.lists(st.floats(1e-2, 1e6), min_size=1, max_size=60)


def coverage(n: int, low_rank: int, high_rank: int) -> float:
    """P(the true median lies between the order statistics of these ranks): as many of n draws below it as a fair coin shows heads."""
    return sum(math.comb(n, below) for below in range(low_rank, high_rank)) / 2**n


@pytest.mark.parametrize("n", range(1, 80))
def test_interval_covers_the_median_and_is_no_wider_than_it_must_be(n: int) -> None:
    interval = median_interval([float(value) for value in range(1, n + 1)])
    low, high = int(interval.low), int(interval.high)
    assert low + high == n + 1
    if n < 6:  # not even the extremes cover 95 %
        assert (low, high) == (1, n) and coverage(n, 1, n) < 0.95
    else:
        assert coverage(n, low, high) >= 0.95
        assert low + 1 > high - 1 or coverage(n, low + 1, high - 1) < 0.95


def test_interval_by_exact_enumeration() -> None:
    """All 2^8 ways in which 8 draws can lie on either side of the median: those in which the interval contains it."""
    inside = 0
    for sides in itertools.product((-1.0, 1.0), repeat=8):
        interval = median_interval([1000.0 + side * (1 + place) for place, side in enumerate(sides)])
        inside += interval.low <= 1000.0 <= interval.high
    assert inside / 2**8 >= 0.95


def test_interval_by_simulation() -> None:
    """On a skewed distribution, whose mean is far from its median, as times are."""
    generator = random.Random(1)
    hits = 0
    for _ in range(2000):
        interval = median_interval([generator.lognormvariate(0.0, 1.5) for _ in range(15)])
        hits += interval.low <= 1.0 <= interval.high
    assert hits / 2000 >= 0.94  # three standard deviations below 0.965, what order statistics 4 and 12 of 15 cover


@given(st.lists(times, min_size=1, max_size=12), st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_a_pooled_quantile_is_that_of_all_values(groups: list[list[float]], share: float) -> None:
    interval = pooled_interval(groups, share)
    assert interval.median == quantile([value for group in groups for value in group], share) and interval.n == len(groups)
    assert interval.low <= interval.median <= interval.high
    assert pooled_interval(groups, share, over=groups).half_width == 0.0  # what belongs together is drawn together


def blocks(generator: random.Random, rounds: int, call_us: float, slow_share: float) -> list[list[float]]:
    """Calls of one true time, and blocks that are held up, each as a whole, by up to twice as much."""
    found = []
    for _ in range(rounds):
        pace = generator.uniform(1.3, 2.0) if generator.random() < slow_share else 1.0
        found.append([call_us * pace * (1 + generator.expovariate(10.0)) for _ in range(30)])
    return found


def test_what_is_known_to_lie_about_one_widens_an_interval_and_moves_nothing() -> None:
    measured = Interval(2.0, 1.9, 2.1, 9)
    same = measured * Interval.about_one(0.0)
    assert (same.median, same.low, same.high, same.n) == pytest.approx((2.0, 1.9, 2.1, 9))
    wider = measured * Interval.about_one(0.05)
    assert (wider.median, wider.n) == (2.0, 9)
    assert math.log(wider.high / 2) ** 2 == pytest.approx(math.log(1.05) ** 2 + (1.96 * 0.05) ** 2)


def test_a_resample_without_the_group_of_the_small_values_has_its_own_quantile() -> None:
    """Its quantile lies far above the sample's, where nearly all resamples end."""
    rng = np.random.default_rng(3)
    groups = [list(range(20)), *(list(100 + rng.permutation(20)) for _ in range(4))]
    times = np.array([[1, 1, 1, 1, 1], [0, 2, 1, 1, 1], [5, 0, 0, 0, 0], [0, 0, 0, 0, 5]])
    for share in (0.05, 0.1, 0.5, 1.0):
        got = _pooled_quantiles(groups, times, share)
        assert list(got) == [quantile([value for group, n in zip(groups, row, strict=True) for value in group * n], share) for row in times]


def test_a_pooled_ratio_holds_where_half_of_the_blocks_are_held_up() -> None:
    generator = random.Random(2)
    hits, errors, paired = 0, [], []
    for _ in range(300):
        a, b = (blocks(generator, 30, us, 0.5) for us in (120.0, 100.0))
        interval = pooled_interval(a, 0.1, over=b)
        hits += interval.low <= 1.2 <= interval.high
        errors.append(abs(interval.median / 1.2 - 1))
        paired.append(abs(median_interval([quantile(x, 0.5) / quantile(y, 0.5) for x, y in zip(a, b, strict=True)]).median / 1.2 - 1))
    assert hits / 300 >= 0.9
    assert quantile(errors, 0.95) < 0.02 < 0.05 < quantile(paired, 0.95)


@given(times, st.randoms())
def test_order_and_permutation(values: list[float], generator: random.Random) -> None:
    interval = median_interval(values)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)
    assert interval.n == len(values) and interval.half_width >= 0
    shuffled = list(values)
    generator.shuffle(shuffled)
    assert median_interval(shuffled) == interval


@given(times, st.integers(-8, 8))
def test_scaling(values: list[float], exponent: int) -> None:
    scale = 2.0**exponent  # exact
    interval, scaled = median_interval(values), median_interval([value * scale for value in values])
    assert (scaled.low, scaled.median, scaled.high) == (interval.low * scale, interval.median * scale, interval.high * scale)


def test_no_values() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])


@given(times, times)
def test_product(a: list[float], b: list[float]) -> None:
    first, second = median_interval(a), median_interval(b)
    product = first * second
    assert product.median == first.median * second.median
    assert product.low <= product.median <= product.high
    assert product.n == min(len(a), len(b))
    # Wider than either factor, narrower than both at their worst together.
    slack = 1 + 1e-9
    for factor in (first, second):
        assert product.high / product.median * slack >= factor.high / factor.median
        assert product.median / product.low * slack >= factor.median / factor.low
    assert product.high <= first.high * second.high * slack
    assert product.low * slack >= first.low * second.low
    swapped = second * first
    assert swapped.low == pytest.approx(product.low) and swapped.high == pytest.approx(product.high)


@given(times, st.floats(1e-4, 1.0))
def test_shrinking_believes_an_estimate_as_far_as_it_is_certain(values: list[float], spread: float) -> None:
    interval = median_interval(values)
    shrunk = interval.shrunk(spread)
    assert shrunk.low <= shrunk.median <= shrunk.high
    assert abs(math.log(shrunk.median)) <= abs(math.log(interval.median)) * (1 + 1e-9)
    assert shrunk.high / shrunk.low <= interval.high / interval.low * (1 + 1e-9)
    assert interval.shrunk(1e6).median == pytest.approx(interval.median)
    certain = Interval(1.05, 1.05, 1.05, 9)
    assert certain.shrunk(spread).median == pytest.approx(1.05)


def test_shrinking_halves_what_is_as_uncertain_as_what_was_known_before() -> None:
    error = 0.01
    interval = Interval(1.04, 1.04 * math.exp(-1.96 * error), 1.04 * math.exp(1.96 * error), 12)
    assert interval.shrunk(error).median == pytest.approx(1.04**0.5)


@given(times)
def test_product_with_a_certain_number(values: list[float]) -> None:
    interval = median_interval(values)
    product = interval * Interval(2.0, 2.0, 2.0, 10**6)
    assert (product.low, product.high) == (pytest.approx(2 * interval.low), pytest.approx(2 * interval.high))


@given(times, st.floats(0, 1))
def test_quantile(values: list[float], share: float) -> None:
    value = quantile(values, share)
    assert value in values
    assert sum(item <= value for item in values) >= share * len(values) - 1e-9
    assert quantile(values, 0.0) == min(values) and quantile(values, 1.0) == max(values)


sizes = st.floats(0, 1e12)


@settings(max_examples=300)
@given(st.floats(1, 1e6), st.floats(0.01, 1), sizes, st.sampled_from(["eager", "graph"]))
def test_slots_of_a_block(call_us: float, share: float, slot_bytes: float, mode: str) -> None:
    rules, memory = TimingRules(), 140e9
    slots = choose_slots(call_us, call_us * share, slot_bytes, memory, rules, mode)
    assert rules.min_slots <= slots <= rules.max_slots
    if slots > rules.min_slots:
        assert slots * call_us <= rules.max_block_us
        assert slots * slot_bytes <= rules.arena_share * memory


def test_slots_are_enough_where_nothing_forbids_it() -> None:
    rules = TimingRules()
    assert choose_slots(40.0, 30.0, 2**20, 140e9, rules, "graph") * 30.0 >= rules.min_block_us["graph"] * 0.98
    assert choose_slots(900.0, 800.0, 2**20, 140e9, rules, "graph") == rules.usual_slots
