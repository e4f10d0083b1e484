"""Medians, their intervals, and the size of a block."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerlane.evaluate.timing.block_times import choose_slots
from peerlane.evaluate.timing.statistics import Interval, _pooled_means, median_interval, paired_interval, pooled_interval, quantile
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


@pytest.mark.parametrize("n", range(1, 13))
def test_a_paired_interval_by_exact_enumeration(n: int) -> None:
    """All 2^n ways in which n deviations, each as likely to either side, can fall: the interval contains the truth in 95 % of them, and
    would not if it were narrower by one mean of two at either end."""
    sizes = [0.01 * 1.37**place for place in range(n)]  # no two sums of them agree
    inside = narrower = 0
    for signs in itertools.product((-1, 1), repeat=n):
        logs = [sign * size for sign, size in zip(signs, sizes, strict=True)]
        interval = paired_interval([2 * math.exp(value) for value in logs], over=[2.0] * n)
        assert interval.low <= interval.median <= interval.high and interval.n == n
        inside += interval.low <= 1 <= interval.high
        means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(logs, 2))
        inner = [mean for mean in means if math.log(interval.low) + 1e-12 < mean < math.log(interval.high) - 1e-12]
        narrower += bool(inner) and inner[0] <= 0 <= inner[-1]
    if n < 6:  # not even the extremes do
        assert inside == 2**n - 2
    else:
        assert inside / 2**n >= 0.95 > narrower / 2**n


@given(times.filter(lambda values: len(values) < 20), st.integers(-8, 8))
def test_a_paired_interval_of_what_agrees_has_no_width_and_scales(values: list[float], exponent: int) -> None:
    same = paired_interval([value * 2.0**exponent for value in values], over=values)
    assert same.low == same.high == same.median == pytest.approx(2.0**exponent)
    ones = [1.0] * len(values)
    interval, inverse = paired_interval(values, over=ones), paired_interval(ones, over=values)
    assert (inverse.low, inverse.median, inverse.high) == pytest.approx((1 / interval.high, 1 / interval.median, 1 / interval.low))


def test_a_paired_estimate_needs_fewer_pairs_than_the_median_and_holds_against_outliers() -> None:
    generator = random.Random(4)
    hits, errors, of_medians, disturbed = 0, [], [], []
    for _ in range(500):
        ratios = [1.2 * math.exp(generator.gauss(0.0, 0.01)) for _ in range(12)]
        interval = paired_interval(ratios, over=[1.0] * 12)
        hits += interval.low <= 1.2 <= interval.high
        errors.append((interval.median / 1.2 - 1) ** 2)
        of_medians.append((median_interval(ratios).median / 1.2 - 1) ** 2)
        ratios[0] *= 2.0
        disturbed.append(abs(paired_interval(ratios, over=[1.0] * 12).median / 1.2 - 1))
    assert hits / 500 >= 0.93 and sum(errors) < 0.8 * sum(of_medians)
    assert max(disturbed) < 0.02


SHARES = [(0.0, 1.0), (0.1, 0.3), (0.0, 0.05), (0.45, 0.55), (0.9, 1.0)]


def mean_between(values: list[float], shares: tuple[float, float], parts: int = 20) -> float:
    """Every value cut into ``parts``, so that the quantiles lie between them."""
    ordered = sorted(value for value in values for _ in range(parts))
    low, high = (round(share * len(ordered)) for share in shares)
    return sum(ordered[low:high]) / (high - low)


@given(st.lists(times, min_size=1, max_size=12), st.sampled_from(SHARES))
def test_a_pooled_mean_is_that_of_all_values_between_the_quantiles(groups: list[list[float]], shares: tuple[float, float]) -> None:
    interval = pooled_interval(groups, shares)
    assert interval.median == pytest.approx(mean_between([value for group in groups for value in group], shares))
    assert interval.low <= interval.median <= interval.high and interval.n == len(groups)
    assert pooled_interval(groups, shares, over=groups).half_width == 0.0  # what belongs together is drawn together


def blocks(generator: random.Random, rounds: int, call_us: float, slow_share: float) -> list[list[float]]:
    """Calls of one true time, and parts of blocks that are held up, each as a whole, by up to twice as much."""
    found = []
    for _ in range(rounds):
        paces = [generator.uniform(1.3, 2.0) if generator.random() < slow_share else 1.0 for _ in range(4)]
        found.append([call_us * pace * (1 + generator.expovariate(10.0)) for pace in paces for _ in range(8)])
    return found


def test_what_is_known_to_lie_about_one_widens_an_interval_and_moves_nothing() -> None:
    measured = Interval(2.0, 1.9, 2.1, 9)
    same = measured * Interval.about_one(0.0)
    assert (same.median, same.low, same.high, same.n) == pytest.approx((2.0, 1.9, 2.1, 9))
    wider = measured * Interval.about_one(0.05)
    assert (wider.median, wider.n) == (2.0, 9)
    assert math.log(wider.high / 2) ** 2 == pytest.approx(math.log(1.05) ** 2 + (1.96 * 0.05) ** 2)


def test_a_resample_without_the_group_of_the_small_values_has_its_own_mean() -> None:
    """Its quantiles lie far above the sample's, where nearly all resamples end."""
    rng = np.random.default_rng(3)
    groups = [list(range(20)), *(list(100 + rng.permutation(20)) for _ in range(4))]
    times = np.array([[1, 1, 1, 1, 1], [0, 2, 1, 1, 1], [5, 0, 0, 0, 0], [0, 0, 0, 0, 5]])
    for shares in SHARES:
        got = _pooled_means(groups, times, shares)
        samples = [[value for group, n in zip(groups, row, strict=True) for value in group * n] for row in times]
        assert list(got) == pytest.approx([mean_between(sample, shares) for sample in samples])


def test_a_pooled_ratio_holds_where_half_of_the_parts_of_blocks_are_held_up() -> None:
    generator = random.Random(2)
    hits, errors, paired = 0, [], []
    for _ in range(300):
        a, b = (blocks(generator, 30, us, 0.5) for us in (120.0, 100.0))
        interval = pooled_interval(a, (0.1, 0.3), over=b)
        hits += interval.low <= 1.2 <= interval.high
        errors.append(abs(interval.median / 1.2 - 1))
        paired.append(abs(median_interval([quantile(x, 0.5) / quantile(y, 0.5) for x, y in zip(a, b, strict=True)]).median / 1.2 - 1))
    assert hits / 300 >= 0.9
    assert 3 * quantile(errors, 0.95) < 0.06 < quantile(paired, 0.95)


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
