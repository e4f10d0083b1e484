"""Parameters of tests of which some represent the others in the default run."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Returns the values as parameters of a test; the long tests run all but the first ``count`` of them."""
    return [pytest.param(value, marks=pytest.mark.long if number >= count else ()) for number, value in enumerate(values)]


def every_second(kernels: Iterable[str], tilings: Iterable[Any]) -> list[Any]:
    """Returns every kernel with every tiling, as parameters of a test; the long tests run half of those with any but the first tiling."""
    made, chosen = list(tilings), []
    for number, kernel in enumerate(kernels):
        for turn, tiling in enumerate(made):
            marks = () if turn == 0 else pytest.mark.slow if (turn + number) % 2 else pytest.mark.long
            chosen.append(pytest.param(kernel, tiling, marks=marks, id=f"{kernel}-{tiling}"))
    return chosen
