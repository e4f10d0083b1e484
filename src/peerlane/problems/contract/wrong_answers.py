"""Makes known wrong answers, so that a problem's file says each of them in a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peerlane.problems.contract.spec import AnswerContext, KnownWrongAnswer
from peerlane.problems.contract.tree import Tree


def wrong(name: str, why: str, answer: Callable[[AnswerContext], Tree], cases: Sequence[str] | None = None) -> KnownWrongAnswer:
    """A :class:`KnownWrongAnswer`, wrong in these cases, or everywhere."""
    return KnownWrongAnswer(name, why, answer, None if cases is None else tuple(cases))
