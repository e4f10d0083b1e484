"""The problem suite: see :class:`Problem` for the contract, ``all_problems()`` for the suite."""

from peerlane.problems._draw import INTEGER, RANDOM, Draw
from peerlane.problems._registry import all_problems, get, numbers, select
from peerlane.problems._spec import (
    UNIT_ROUNDOFF,
    Case,
    CaseSpec,
    Cost,
    Expected,
    HonestVariant,
    NullAnswer,
    NullContext,
    Preset,
    Problem,
    Score,
    Tolerance,
    case,
    exactly,
    preset,
)
from peerlane.problems._tree import GroupRef

__all__ = [
    "INTEGER",
    "RANDOM",
    "UNIT_ROUNDOFF",
    "Case",
    "CaseSpec",
    "Cost",
    "Draw",
    "Expected",
    "GroupRef",
    "HonestVariant",
    "NullAnswer",
    "NullContext",
    "Preset",
    "Problem",
    "Score",
    "Tolerance",
    "all_problems",
    "case",
    "exactly",
    "get",
    "numbers",
    "preset",
    "select",
]
