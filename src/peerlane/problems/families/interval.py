"""Answers that rounding may decide either way: an interval of right answers per element, and its comparison.

A quantised element whose quotient lies near the middle between two codes may get either; so may the choice among nearly equal experts. Both
answers are right, and nothing between or beyond them need be tolerated for the sake of the other elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from peerlane.problems.contract import Case, Expected, Score, Tolerance, Tree, compare_close, compare_exact, expected_leaves, leaves


@dataclass(kw_only=True)
class Interval(Expected):
    """Any answer in [``low``, ``high``] is right, and ``value`` is one of them. The tolerance applies to what lies outside.

    All three are NaN where the answer is NaN. A tolerance of nothing makes every answer outside infinitely wrong.
    """

    low: torch.Tensor
    high: torch.Tensor


def comparison(tolerance: Callable[[Case], Mapping[str, Tolerance]]) -> Callable[[Case, Tree, Tree, str], list[Score]]:
    """A ``Problem.compare`` that knows intervals. Exact outputs are compared bit for bit, except that one NaN is as good as another."""

    def compare(case: Case, got: Tree, expected: Tree, kind: str) -> list[Score]:
        tolerances = tolerance(case)
        pairs = zip(leaves(got), expected_leaves(expected), strict=True)
        return [_score(value, leaf, tolerances.get(leaf.name, Tolerance())) for value, leaf in pairs]

    return compare


def _score(got: torch.Tensor, leaf: Expected, tolerance: Tolerance) -> Score:
    if leaf.exact:
        return compare_exact(leaf.name, _one_nan(got), _one_nan(leaf.value.to(leaf.dtype)))
    if not isinstance(leaf, Interval):
        return compare_close(leaf.name, got, leaf, tolerance)
    work = torch.float64 if leaf.value.dtype == torch.float64 else torch.float32
    wide = got.to(work)
    nearest = torch.minimum(torch.maximum(wide, leaf.low.to(work)), leaf.high.to(work))
    nearest = torch.where(wide.isnan(), leaf.value.to(work), nearest)
    return compare_close(leaf.name, got, dataclasses.replace(leaf, value=nearest), tolerance)


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isnan(), math.nan, tensor) if tensor.is_floating_point() else tensor
