"""Metrics against hand-counted figures, brute force and properties."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerlane.generate import metrics
from peerlane.generate.board import Board, Entry
from peerlane.generate.metrics import CORRECT, Metric, binomial_interval, student_t
from peerlane.generate.samples import NO_CODE, Sample, Speedup, Task, Usage, best_sample
from peerlane.generate.summary import model_table, summary

VERDICTS = ["correct", "wrong_result", "hang", NO_CODE, "not_run"]


def sample(problem: int, number: int, verdict: str = "correct", speed: float | None = None, **more: object) -> Sample:
    speedups = {} if speed is None else {"eager": Speedup(speed * 0.9, speed, speed * 1.1)}
    return Sample(problem, number, verdict, speedups, author="m", **more)


def solved(run: Sequence[Sample], problems: Sequence[int], metric: Metric, k: int, *, unjudged: bool = False) -> dict[int, float]:
    groups = metrics.by_task(run, [Task(number) for number in problems])
    found = metrics.solved(groups, metric, k, unjudged=unjudged)
    return {task.problem: value for task, value in found.items()}


def entry(run: Sequence[Sample]) -> Entry:
    return Entry("m", run, [Task(number) for number in (*PROBLEMS, 5)])


def board(run: Sequence[Sample], categories: dict[int, str]) -> Board:
    return Board(None, run, {Task(number): category for number, category in categories.items()}, ["m"])


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    draws = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    assert metrics.pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7).flatmap(lambda v: st.tuples(st.just(v), st.integers(1, len(v)))))
def test_expected_best_is_the_mean_of_the_largest_in_all_draws(case: tuple[list[float], int]) -> None:
    values, k = case
    draws = list(itertools.combinations(values, k))
    assert metrics.expected_best(values, k) == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-9)


@pytest.mark.parametrize(("samples", "correct", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1), (3, -1, 1)])
def test_pass_at_k_of_impossible_counts_is_an_error(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= correct"):
        metrics.pass_at_k(samples, correct, k)


def test_pass_at_k_is_unbiased() -> None:
    """Over many sets of 6 samples of a model that is right with probability 0.3, pass@2 averages 1 - 0.7^2."""
    draw = random.Random(1)
    found = [metrics.pass_at_k(6, sum(draw.random() < 0.3 for _ in range(6)), 2) for _ in range(20_000)]
    assert sum(found) / len(found) == pytest.approx(0.51, abs=0.01)


RUN = [
    sample(1, 0, speed=2.0),
    sample(1, 1, "wrong_result"),
    sample(1, 2, speed=1.05),
    sample(2, 0, "hang"),
    sample(2, 1, NO_CODE),
    sample(2, 2, speed=0.5),
    sample(3, 0, "wrong_result"),
    sample(3, 1, "wrong_result"),
    sample(3, 2, "not_run"),
]
PROBLEMS = [1, 2, 3, 4]


def test_samples_that_were_not_judged_count_at_both_ends() -> None:
    """They are failures at one end and right at the other: nobody knows."""
    run = [sample(1, 0), sample(1, 1, "not_run"), sample(2, 0, "harness_error"), sample(2, 1, "hang"), sample(2, 2)]
    assert solved(run, [1, 2], CORRECT, 1) == pytest.approx({1: 1 / 2, 2: 1 / 3})
    assert solved(run, [1, 2], CORRECT, 1, unjudged=True) == pytest.approx({1: 1.0, 2: 2 / 3})
    assert entry(run).unjudged == 2


def test_hand_counted_run() -> None:
    correct = solved(RUN, PROBLEMS, CORRECT, 1)
    assert correct == pytest.approx({1: 2 / 3, 2: 1 / 3, 3: 0.0, 4: 0.0})
    assert solved(RUN, PROBLEMS, CORRECT, 2) == pytest.approx({1: 1.0, 2: 2 / 3, 3: 0.0, 4: 0.0})
    assert solved(RUN, PROBLEMS, CORRECT, 3) == {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0}
    # The lower end counts: 1.05 * 0.9 is not above 1, 2.0 * 0.9 is.
    assert solved(RUN, PROBLEMS, Metric("eager", 1.0), 1) == pytest.approx({1: 1 / 3, 2: 0.0, 3: 0.0, 4: 0.0})
    assert not any(solved(RUN, PROBLEMS, Metric("graph", 1.0), 3).values())
    assert entry(RUN).modes == ["eager"]
    assert entry(RUN).verdicts == {"correct": 3, "wrong_result": 3, "hang": 1, NO_CODE: 1, "not_run": 1}
    assert entry(RUN).unjudged == 1
    found = board(RUN, {1: "a", 2: "b", 3: "a", 4: "c"})
    (one,) = found.entries
    assert one.geometric_mean("eager", 3).value == pytest.approx(2**0.25)
    by_category = {name: one.count(CORRECT, 1, tasks).solved for name, tasks in found.categories.items()}
    assert by_category == pytest.approx({"a": 2 / 3, "b": 1 / 3, "c": 0.0, "total": 1.0})


RUNS = st.lists(
    st.builds(sample, st.integers(1, 5), st.integers(0, 9), st.sampled_from(VERDICTS), st.none() | st.floats(0.1, 10)), max_size=30
)


@given(RUNS)
def test_properties_of_counts(run: list[Sample]) -> None:
    problems = [1, 2, 3, 4, 5]
    assert sum(entry(run).verdicts.values()) == len(run)
    previous = dict.fromkeys(problems, 0.0)
    for k in (1, 2, 3):
        correct = solved(run, problems, CORRECT, k)
        assert all(0 <= value <= 1 for value in correct.values()) and list(correct) == problems
        assert all(correct[number] >= previous[number] - 1e-12 for number in problems), "more samples never solve less"
        previous = correct
        fast = [solved(run, problems, Metric("eager", p), k) for p in (0.5, 1.0, 2.0)]
        for slower, faster in itertools.pairwise([correct, *fast]):
            assert all(faster[number] <= slower[number] + 1e-12 for number in problems), "a higher bar is passed less often"
    assert entry(run).geometric_mean("eager").value >= 1


def test_both_denominators_of_multicast() -> None:
    """Problem 3 has no other sample than ones that need it; one without any sample counts as unsolved in both."""
    need = [sample(problem, number, "cuda_error", needs_multicast=True) for problem, number in ((1, 1), (3, 0), (3, 1))]
    every = board([sample(1, 0, "correct"), sample(2, 0, "hang"), *need], dict.fromkeys(PROBLEMS, "a"))
    found = summary(every, every.entries[0], [1], [1.0])
    rest = found["without_multicast"]
    assert (found["needs_multicast"], found["problems"], found["samples"]) == (3, 4, 5)
    assert (rest["problems"], rest["samples"]) == (3, 2)
    assert found["pass_at_k"]["1"]["share"] == pytest.approx(0.5 / 4) and rest["pass_at_k"]["1"]["share"] == pytest.approx(1 / 3)
    shown = model_table(every, [1], [1.0]).markdown()
    assert "| m | correct | 1 | 0.5 |" in shown and "| m, without multicast | correct | 1 | 1 |" in shown
    few = board(need, {1: "a", 3: "a"})
    alone = summary(few, few.entries[0], [1], [1.0])
    assert alone["without_multicast"]["problems"] == 0 and alone["without_multicast"]["pass_at_k"] == {}


def test_a_sample_of_another_problem_is_an_error() -> None:
    with pytest.raises(ValueError, match="problem 9"):
        solved([sample(9, 0)], [1], CORRECT, 1)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_interval_holds_the_mean_and_a_model_equals_itself(values: list[float]) -> None:
    mean = metrics.mean_with_interval(values)
    assert mean.low - 1e-9 <= mean.value <= mean.high + 1e-9
    model = dict(enumerate(values))
    same = metrics.compare(model, model)
    assert same.difference == (0, 0, 0) and same.better == 0.5


def test_a_share_is_never_certain() -> None:
    """8 of 8 is no proof of 100 %: the Clopper-Pearson interval says so, and 0 of 8 is its mirror image."""
    value, low, high = metrics.share([1.0] * 8)
    assert (value, high) == (1.0, 1.0) and low == pytest.approx(0.025 ** (1 / 8))
    assert metrics.share([0.0] * 8) == pytest.approx((0.0, 0.0, 1 - low))
    assert metrics.share([1.0]).low == pytest.approx(0.025)
    assert binomial_interval(1.0, 10) == pytest.approx((0.00252858, 0.44501612))  # as printed in tables of this interval
    assert [student_t(freedom) for freedom in (1, 2, 10)] == pytest.approx([12.7062, 4.30265, 2.22814], rel=1e-5)


def test_equal_values_have_an_interval() -> None:
    """One right answer of three at each of three problems: the spread over problems is zero but for rounding, and says nothing."""
    found = metrics.share([1 / 3] * 3)
    assert found.low < 0.05 and found.high > 0.85


def test_unjudged_samples_give_both_ends() -> None:
    """One right sample and three that no machine could run are no 100 %."""
    run = [sample(1, 0), *(sample(1, number, "not_run") for number in (1, 2, 3))]
    every = board(run, {1: "collective"})
    found = summary(every, every.entries[0], [1, 4], [1.0])["pass_at_k"]
    assert {name: found["1"][name] for name in ("problems", "problems_most", "share", "share_most", "high")} == {
        "problems": 0.25,
        "problems_most": 1.0,
        "share": 0.25,
        "share_most": 1.0,
        "high": 1.0,
    }
    assert found["4"]["share"] == 1.0
    assert "| 0.2 to 1 |" in model_table(every, [1], [1.0]).markdown()
    assert "25.0% to 100.0%" in model_table(every, [1], [1.0]).markdown()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_a_share_s_interval_holds_it(values: list[float]) -> None:
    found = metrics.share(values)
    assert 0 <= found.low <= found.value + 1e-12 and found.value - 1e-12 <= found.high <= 1 and found.low < found.high


POPULATIONS: dict[str, tuple[float, ...]] = {
    "alike": (0.5,),
    "hard": (0.1,),
    "easy": (0.9,),
    "solved or not": (0.0, 1.0),
    "mostly solved": (0.0, 1.0, 1.0, 1.0, 1.0),
    "mixed": (0.05, 0.5, 0.95),
    "rarely": (0.02, 0.02, 0.02, 0.5),
}
"""rates of solving a problem, one of which each problem has"""


def coverage(problems: int, samples: int, k: int, rates: Sequence[float], runs: int) -> float:
    """How often the interval of pass@k holds the mean over all problems that there could be."""
    draw = np.random.default_rng([problems, samples, k, len(rates)])
    truth = sum(1 - (1 - rate) ** k for rate in rates) / len(rates)
    correct = draw.binomial(samples, draw.choice(rates, size=(runs, problems)))
    values = np.array([metrics.pass_at_k(samples, count, k) for count in range(samples + 1)])[correct]
    found = [metrics.share(list(row)) for row in values]
    return sum(item.low <= truth <= item.high for item in found) / runs


@pytest.mark.parametrize("rates", POPULATIONS.values(), ids=POPULATIONS)
def test_a_share_s_interval_covers_as_often_as_it_says(rates: Sequence[float]) -> None:
    for problems, samples in ((3, 1), (3, 3), (8, 3), (40, 2)):
        assert coverage(problems, samples, 1, rates, 300) >= 0.95 - 3 * (0.95 * 0.05 / 300) ** 0.5


@pytest.mark.long
@pytest.mark.parametrize("rates", POPULATIONS.values(), ids=POPULATIONS)
@pytest.mark.parametrize("problems", [3, 4, 5, 6, 8, 12, 20, 40, 87])
def test_a_share_s_interval_covers_from_three_problems_on(problems: int, rates: Sequence[float]) -> None:
    runs = 4000
    for samples in (1, 2, 3, 5, 10):
        for k in sorted({1, (samples + 1) // 2, samples}):
            covered = coverage(problems, samples, k, rates, runs)
            assert covered >= 0.95 - 3.5 * (0.95 * 0.05 / runs) ** 0.5, (samples, k, covered)


def test_problems_without_a_judged_sample_are_not_tried() -> None:
    assert entry(RUN).tried == {Task(1), Task(2), Task(3)} and not entry([sample(1, 0, "not_run")]).tried


def test_pairing_tells_a_small_but_steady_lead() -> None:
    """Problems differ by 0.8, the models by 0.05 at each: unpaired intervals overlap, the paired one does not hold zero."""
    b = {number: 0.1 + 0.8 * (number % 2) for number in range(40)}
    a = {number: value + 0.05 + 0.01 * (number % 3) for number, value in b.items()}
    found = metrics.compare(a, b)
    assert found.difference.low > 0 and found.better == 1 and found.problems == 40
    assert metrics.mean_with_interval(list(a.values())).low < metrics.mean_with_interval(list(b.values())).high


@pytest.mark.parametrize("problems", [3, 6, 20])
def test_a_mean_s_interval_covers_from_three_problems_on(problems: int) -> None:
    """Logarithms of speedups, as bell curves have them."""
    draw = np.random.default_rng(problems)
    found = [metrics.geometric_mean(list(row)) for row in draw.normal(0.7, 0.5, size=(1000, problems))]
    assert sum(item.low <= math.exp(0.7) <= item.high for item in found) >= 930


def test_steps_of_agents() -> None:
    steps = (sample(1, 0, "build_error"), sample(1, 0, speed=0.8), sample(1, 0, "wrong_result"), sample(1, 0, speed=1.5))
    best = best_sample(steps)
    assert best is steps[3]
    run = [replace(best, steps=steps), sample(2, 0, "hang", steps=(sample(2, 0, "hang"),))]
    assert metrics.step_curve(run, [Task(1), Task(2)], CORRECT) == [0, 1, 1, 1]
    assert metrics.step_curve(run, [Task(1), Task(2)], Metric("eager", 1.0)) == [0, 0, 0, 1]
    assert metrics.step_curve([sample(1, 0)], [Task(1)], CORRECT) == []


def test_usage_adds_up() -> None:
    run = [sample(1, 0, usage=Usage(10, 5, 2, 1, 0.5, 1)), sample(1, 1, usage=Usage(20, 7, calls=1))]
    assert entry(run).usage == Usage(30, 12, 2, 1, 0.5, 2)


def test_mechanisms_of_correct_samples_count() -> None:
    run = [sample(1, 0, mechanisms=("tma", "nccl")), sample(1, 1, mechanisms=("tma",)), sample(1, 2, "hang", mechanisms=("tma",))]
    assert entry(run).mechanisms == {"tma": 2, "nccl": 1}
