"""Answers that rounding may decide either way: an interval of right answers per element, and its comparison.

A quantised element whose quotient lies near the middle between two codes may get either; so may the choice among nearly equal experts. Both
answers are right, and nothing between or beyond them need be tolerated for the sake of the other elements.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from peerlane.problems import contract as pc


@dataclass(kw_only=True)
class Interval(pc.Expected):
    """Any answer in [``low``, ``high``] is right, and ``value`` is one of them. The tolerance applies to what lies outside.

    All three are NaN where the answer is NaN. A tolerance of nothing makes every answer outside infinitely wrong.
    """

    low: torch.Tensor
    high: torch.Tensor


def comparison(tolerance: Callable[[pc.Case], Mapping[str, pc.Tolerance]]) -> Callable[[pc.Case, pc.Tree, pc.Tree, str], list[pc.Score]]:
    """A ``Problem.compare`` that knows intervals. Exact outputs are compared bit for bit, except that one NaN is as good as another."""

    def compare(case: pc.Case, got: pc.Tree, expected: pc.Tree, kind: str) -> list[pc.Score]:
        """Where rounding decides between two answers, such as neighbouring codes or nearly equal experts, either is right."""
        tolerances = tolerance(case)
        pairs = zip(pc.leaves(got), pc.expected_leaves(expected), strict=True)
        return [_score(value, leaf, tolerances.get(leaf.name, pc.Tolerance())) for value, leaf in pairs]

    return compare


def _score(got: torch.Tensor, leaf: pc.Expected, tolerance: pc.Tolerance) -> pc.Score:
    if leaf.exact:
        return pc.compare_exact(leaf.name, _one_nan(got), _one_nan(leaf.value.to(leaf.dtype)))
    if not isinstance(leaf, Interval):
        return pc.compare_close(leaf.name, got, leaf, tolerance)
    work = torch.float64 if leaf.value.dtype == torch.float64 else torch.float32
    wide = got.to(work)
    nearest = torch.minimum(torch.maximum(wide, leaf.low.to(work)), leaf.high.to(work))
    nearest = torch.where(wide.isnan(), leaf.value.to(work), nearest)
    return pc.compare_close(leaf.name, got, dataclasses.replace(leaf, value=nearest), tolerance)


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isnan(), math.nan, tensor) if tensor.is_floating_point() else tensor
