"""Parameters of tests of which the first represent the others in the default run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Returns the values as parameters of a test; the long tests run all but the first ``count`` of them."""
    return [pytest.param(value, marks=pytest.mark.long if number >= count else ()) for number, value in enumerate(values)]
