"""What the graph-parallel problems share: how many rows go from which rank to which, and skewed ids."""

import functools
import math
import random
from collections.abc import Sequence

import torch

from peerlane.problems import contract as pc

# Sizes drawn per slot lie this far from their mean at most.
_JITTER = 0.1

Table = list[list[int]]


def count_table(case: pc.Case, ranks: int, layout: random.Random) -> Table:
    """Rows that every rank (first index) has for every rank of a group. ``case["splits"]``:

    * equal: ``rows`` per rank, divided equally
    * uneven: 1 to 9 rows, drawn anew for every pair
    * idle: uneven, but the first rank has rows for nobody and nobody has any for the last
    * nothing: no rows at all
    * gather: every rank has ``rows`` rows, all of them for rank 0
    * heavy: one rank has 80 % of all rows
    * diagonal: about ``rows`` per rank; four times as many for itself as for another rank
    * popular: about ``rows`` per rank; rank d is wanted in proportion to (d + 1) ** -0.7
    * ragged: about ``rows`` per rank, 30 % more or less from rank to rank
    """
    kind = case["splits"]
    if kind in ("uneven", "idle"):
        table = [[layout.randrange(1, 10) for _ in range(ranks)] for _ in range(ranks)]
        if kind == "idle":
            table = [[0 if source == 0 or target == ranks - 1 else n for target, n in enumerate(row)] for source, row in enumerate(table)]
        return table
    means = _means(case, ranks)
    if kind in ("equal", "nothing", "gather"):
        return [[int(mean) for mean in row] for row in means]
    return [[round(mean * layout.uniform(1 - _JITTER, 1 + _JITTER)) for mean in row] for row in means]


def least_table(case: pc.Case, ranks: int) -> Table:
    """Lower bounds of :func:`count_table`, whatever the slot."""
    kind = case["splits"]
    if kind == "uneven":
        return [[1] * ranks for _ in range(ranks)]
    if kind == "idle":
        return [[int(source != 0 and target != ranks - 1) for target in range(ranks)] for source in range(ranks)]
    exact = kind in ("equal", "nothing", "gather")
    return [[int(mean if exact else mean * (1 - _JITTER)) for mean in row] for row in _means(case, ranks)]


def _means(case: pc.Case, ranks: int) -> list[list[float]]:
    rows: int = case.params.get("rows", 0)
    match case["splits"]:
        case "equal":
            return [[float(rows // ranks)] * ranks for _ in range(ranks)]
        case "nothing":
            return [[0.0] * ranks for _ in range(ranks)]
        case "gather":
            return [[float(rows)] + [0.0] * (ranks - 1) for _ in range(ranks)]
        case "heavy":
            return [[rows * (0.8 if source == 1 else 0.2 / (ranks - 1))] * ranks for source in range(ranks)]
        case "diagonal":
            return [[rows * (4 if source == target else 1) / (ranks + 3) for target in range(ranks)] for source in range(ranks)]
        case "popular":
            weights = [(target + 1) ** -0.7 for target in range(ranks)]
            return [[rows * weight / sum(weights) for weight in weights] for _ in range(ranks)]
        case "ragged":
            return [[rows * (0.7 + 0.6 * source / (ranks - 1)) / ranks] * ranks for source in range(ranks)]
        case other:
            raise ValueError(f"unknown splits {other!r}")


def skewed(draw: pc.Draw, count: int, below: int, skew: float = 1.0) -> torch.Tensor:
    """``count`` int64 numbers in [0, below): floor(below u^skew) with u uniform. With ``skew`` > 1 small numbers are more frequent."""
    return (fine_uniform(draw, count).pow_(skew) * below).to(torch.int64)


def fine_uniform(draw: pc.Draw, count: int) -> torch.Tensor:
    """U[0, 1) in float64 with 48 random bits; a float32 has 24, too few to reach every row of a large table."""
    coarse, fine = (draw.uniform((count,), torch.float32).to(torch.float64) for _ in range(2))
    return coarse.add_(fine, alpha=2.0**-24)


@functools.cache
def expected_distinct(count: int, below: int, skew: float = 1.0) -> float:
    """The expected number of different values among those that :func:`skewed` draws: the sum over values v of 1 - (1 - p_v)^count."""
    if below == 0:
        return 0.0
    # Values beyond the first 2^12 are taken together where p_v changes by less than 0.1 %.
    first = min(below, 2**12)
    steps = int(math.log(below / first) / 1e-3) + 2
    edges = torch.cat(
        (torch.arange(first, dtype=torch.float64), torch.logspace(math.log2(first), math.log2(below), steps, 2, dtype=torch.float64))
    )
    width = edges.diff()
    share = ((edges / below) ** (1 / skew)).diff() / width.clamp(min=1e-9)
    return float((width * -torch.expm1(count * torch.log1p(-share.clamp(max=1 - 1e-12)))).sum())


def per_rank(numbers: int | Sequence[int], index: int) -> int:
    """One number for all ranks of a group, or numbers that repeat over them."""
    return numbers if isinstance(numbers, int) else numbers[index % len(numbers)]
