"""Finds the problems: each module ``pNNN_slug`` of :mod:`peerlane.problems` declares one ``PROBLEM``. Adding a problem is adding a file."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path

from peerlane.errors import UnknownProblem, UsageError
from peerlane.problems.contract.spec import Problem

_NAME = re.compile(r"p(\d{3})_(\w+)")


@functools.cache
def _modules() -> Mapping[int, str]:
    found = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parents[1])]):
        if match := _NAME.fullmatch(info.name):
            found[int(match[1])] = info.name
    return dict(sorted(found.items()))


def numbers() -> tuple[int, ...]:
    """The numbers of all problems, ascending."""
    return tuple(_modules())


@functools.cache
def get(number: int) -> Problem:
    """The problem with this number; raises :class:`UnknownProblem`."""
    name = _modules().get(number)
    if name is None:
        raise UnknownProblem(f"there is no problem {number}; `peerlane list` prints those there are")
    problem = importlib.import_module(f"peerlane.problems.{name}").PROBLEM
    assert isinstance(problem, Problem) and problem.id == number and name == f"p{number:03d}_{problem.slug}", name
    return problem


def all_problems() -> tuple[Problem, ...]:
    """All problems, by number."""
    return tuple(get(number) for number in numbers())


def select(text: str) -> tuple[Problem, ...]:
    """Problems by number: ``"13"``, ``"1-8,13"``, ``"all"``. Ranges skip numbers that do not exist; single numbers must exist."""
    if text.strip() == "all":
        return all_problems()
    chosen: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise UsageError(f"cannot read problems {text!r}: expected numbers and ranges such as 1-8,13, or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if match[2] is None and first not in _modules():
            get(first)
        inside = [number for number in _modules() if first <= number <= last]
        if not inside:
            raise UnknownProblem(f"no problem lies in {part.strip()!r}; `peerlane list` prints those there are")
        chosen.update(dict.fromkeys(inside))
    return tuple(get(number) for number in sorted(chosen))
