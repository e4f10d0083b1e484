"""The error model: which error counts, element by element, over the whole and row by row; where infinities and NaN must be."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems import INTEGER, RANDOM
from peerlane.problems.contract import Expected, Score, Tolerance, compare_close, judge
from peerlane.problems.contract.judge import digests, type_mismatch

TOLERANCE = Tolerance(relative=0.01, magnitude=0.02, rms=0.01, normwise=0.05, rowwise=0.1)
SPECIAL = (math.inf, -math.inf, math.nan)


@pytest.fixture(params=(1 << 26, 8), ids=("whole", "pieces"), autouse=True)
def _piece_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_PIECE_ELEMENTS", request.param)


def _score(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor | None, tolerance: Tolerance = TOLERANCE) -> Score:
    return compare_close("out", got, Expected("out", want, torch.float32, magnitude=magnitude), tolerance)


def _by_definition(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor) -> float:
    """The largest share of what is allowed, element by element in Python; infinite where a special element is not where it belongs."""
    rows, everything = [], []
    for got_row, want_row, magnitude_row in zip(got.tolist(), want.tolist(), magnitude.tolist(), strict=True):
        rows.append([])
        for a, b, scale in zip(got_row, want_row, magnitude_row, strict=True):
            if math.isfinite(a) and math.isfinite(b):
                rows[-1].append((abs(a - b), abs(b), scale))
            elif a == b or (math.isnan(a) and math.isnan(b)):
                rows[-1].append((0.0, 0.0, scale))
            else:
                return math.inf
        everything += rows[-1]
    rms = math.sqrt(sum(b * b for _, b, _ in everything) / len(everything))
    elementwise = max(error / (0.01 * b + 0.02 * scale + 0.01 * rms) if error else 0.0 for error, b, scale in everything)
    return max(elementwise, _relative(everything) / 0.05, *(_relative(row) / 0.1 for row in rows))


def _relative(items: list[tuple[float, float, float]]) -> float:
    size = math.hypot(*(b for _, b, _ in items))
    return math.hypot(*(error for error, _, _ in items)) / size if size else 0.0


@pytest.mark.parametrize("seed", range(60))
def test_errors_count_as_the_model_says_beside_infinity_and_nan(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    want = torch.randn(5, 7, dtype=torch.float64) * (torch.rand(5, 7) < 0.8)
    magnitude = want.abs() + torch.rand(5, 7)
    got = want + dice.choice((0.0, 1e-3, 1e-2, 1e-1)) * torch.randn(5, 7)
    for _ in range(dice.choice((0, 0, 1, 3))):
        place, value = (dice.randrange(5), dice.randrange(7)), dice.choice(SPECIAL)
        want[place] = value
        got[place] = dice.choice((value, value, value, 0.5, *SPECIAL))
    if dice.random() < 0.2:
        got[dice.randrange(5), dice.randrange(7)] = dice.choice(SPECIAL)
    assert _score(got, want, magnitude).ratio == pytest.approx(_by_definition(got, want, magnitude), rel=1e-5)


@pytest.mark.parametrize(
    ("tolerance", "detail", "index"),
    [
        (Tolerance(relative=0.1), "elementwise: error 3, allowed 0.1", (1, 2)),
        (Tolerance(relative=10.0, normwise=0.1), "normwise: relative error 0.866, allowed 0.1", (1, 2)),
        (Tolerance(relative=10.0, rowwise=0.1), "rowwise: relative error 1.5, allowed 0.1", (1,)),
    ],
)
def test_what_is_out_of_tolerance_is_named_with_its_place(tolerance: Tolerance, detail: str, index: tuple[int, ...]) -> None:
    want = torch.ones(3, 4, dtype=torch.float64)
    got = want.clone()
    got[1, 2] = 4.0
    score = _score(got, want, None, tolerance)
    assert (score.detail, score.index) == (detail, index) and score.ratio > 1


@pytest.mark.parametrize("value", SPECIAL)
def test_special_elements_must_be_where_the_oracle_has_one(value: float) -> None:
    want = torch.ones(2, 3, dtype=torch.float64)
    got = want.clone()
    want[0, 1] = got[0, 1] = value
    assert _score(got, want, torch.ones(2, 3)).ratio == 0
    got[1, 2] = value
    score = _score(got, want, torch.ones(2, 3))
    assert score.ratio == math.inf and score.index == (1, 2)
    assert score.detail == "1 NaN or infinite elements not where the oracle has them"


def test_an_error_where_none_is_allowed_is_infinite() -> None:
    want = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert _score(want.clone(), want, None, Tolerance(relative=0.1)).ratio == 0
    score = _score(want + torch.tensor([1e-9, 0.0]), want, None, Tolerance(relative=0.1))
    assert score.ratio == math.inf and score.index == (0,)


def test_an_infinite_magnitude_allows_nothing() -> None:
    want, magnitude = torch.ones(3, dtype=torch.float64), torch.tensor([math.inf, math.nan, 1.0])
    for place, right in ((0, False), (1, False), (2, True)):
        got = want.clone()
        got[place] += 0.015
        assert (_score(got, want, magnitude, Tolerance(relative=0.01, magnitude=0.01)).ratio <= 1) == right


def test_a_tolerance_that_scales_with_a_magnitude_needs_one() -> None:
    with pytest.raises(ValueError, match="magnitude that the oracle did not give"):
        _score(torch.ones(2), torch.ones(2), None)


def test_an_output_without_a_tolerance_is_named_with_the_remedy() -> None:
    problem = dataclasses.replace(problems.get(1), tolerance=lambda _: {"other": TOLERANCE})
    got, expected = torch.zeros(2), Expected("sum", torch.zeros(2), torch.float32)
    with pytest.raises(ValueError, match=r"output 'sum': tolerance\(case\) has no entry for it, only for: other; add one, or .*exactly"):
        judge.score(problem, problem.cases("small", 2)[0], got, expected)


def test_checksums_tell_contents_and_places_apart() -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    swapped = tensor.flip(0)
    empty = torch.empty(0, dtype=torch.float32)
    one, other, nothing = digests([tensor, swapped, empty])
    assert one != other and nothing == 0 and digests([tensor.clone()]) == [one]


SUM = Expected("sum", torch.zeros(2, 3, dtype=torch.float64), torch.bfloat16)


@pytest.mark.parametrize(
    ("got", "expected", "told"),
    [
        (torch.empty(2, 3, dtype=torch.bfloat16), SUM, None),
        (torch.empty(3, 2, dtype=torch.bfloat16).T, SUM, None),
        (torch.empty(2, 3), SUM, "output: got dtype float32, expected bfloat16"),
        (torch.empty(2, 3, dtype=torch.float16), SUM, "output: got dtype float16, expected bfloat16"),
        (torch.empty(3, 2, dtype=torch.bfloat16), SUM, "output: got shape (3, 2), expected (2, 3)"),
        (torch.empty(6, dtype=torch.bfloat16), SUM, "output: got shape (6,), expected (2, 3)"),
        (None, SUM, "output: got None, expected a tensor"),
        ((torch.empty(2, 3, dtype=torch.bfloat16),), SUM, "output: got a tuple, expected a tensor"),
        ([torch.empty(2, 3, dtype=torch.bfloat16)], (SUM,), "output: got list of 1, expected tuple of 1"),
        ((torch.empty(2, 3, dtype=torch.bfloat16), 3), (SUM,), "output: got tuple of 2, expected tuple of 1"),
        ((torch.empty(2, 3), 3), (SUM, 3), "output[0]: got dtype float32, expected bfloat16"),
        ((torch.empty(2, 3, dtype=torch.bfloat16), 4), (SUM, 3), "output[1]: got 4, expected 3"),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, "output: got a dict with keys ['b', 'a'], expected a dict with keys ['a', 'b']"),
    ],
)
def test_types_are_exact(got: Any, expected: Any, told: str | None) -> None:
    assert type_mismatch(got, expected) == told


def test_sums_of_whole_numbers_are_exact_and_other_sums_are_not() -> None:
    """Of whole numbers a sum is exact in any order, so every error is one; it may come out as either zero. Moved data keeps its zeros."""
    problem = dataclasses.replace(problems.get(1), integer_exact=True, compare=None)
    (case, *_), want = problem.cases("small", 2), torch.tensor([64.0, 0.0], dtype=torch.float64)
    (name,) = problem.tolerance(case)

    def ratio(got: list[float], kind: str, exact: bool = False) -> float:
        expected = Expected(name, want, torch.float32, exact=exact, magnitude=torch.full((2,), 128.0))
        return judge.score(problem, case, torch.tensor(got), expected, kind)[0].ratio

    beside = float(torch.nextafter(torch.tensor(64.0), torch.tensor(65.0)))
    assert 0.0 < ratio([beside, 0.0], RANDOM) <= 1.0 and ratio([beside, 0.0], INTEGER) == math.inf
    assert ratio([64.0, -0.0], INTEGER) == 0.0 == ratio([64.0, -0.0], RANDOM)
    assert ratio([64.0, 0.0], RANDOM, exact=True) == 0.0 and ratio([64.0, -0.0], RANDOM, exact=True) == math.inf
