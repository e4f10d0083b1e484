"""The problem suite: see :class:`Problem` for the contract, ``all_problems()`` for the suite."""

from peerlane.problems.contract.draw import INTEGER, RANDOM, Draw
from peerlane.problems.contract.registry import all_problems, get, named, numbers, select, suite
from peerlane.problems.contract.spec import (
    UNIT_ROUNDOFF,
    AlternativeSolution,
    AnswerContext,
    Case,
    CaseSpec,
    Cost,
    Expected,
    KnownWrongAnswer,
    Preset,
    Problem,
    Score,
    Tolerance,
    case,
    exactly,
    preset,
)
from peerlane.problems.contract.tree import GroupRef

__all__ = [
    "INTEGER",
    "RANDOM",
    "UNIT_ROUNDOFF",
    "AlternativeSolution",
    "AnswerContext",
    "Case",
    "CaseSpec",
    "Cost",
    "Draw",
    "Expected",
    "GroupRef",
    "KnownWrongAnswer",
    "Preset",
    "Problem",
    "Score",
    "Tolerance",
    "all_problems",
    "case",
    "exactly",
    "get",
    "named",
    "numbers",
    "preset",
    "select",
    "suite",
]
