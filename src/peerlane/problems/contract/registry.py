"""Gives the problems that :mod:`peerlane.common.problem_files` finds: each module ``pNNN_slug`` declares one ``PROBLEM``."""

import functools
import importlib
import re
import sys
import traceback
from types import ModuleType

from peerlane.common.files import read_regular, shown_path
from peerlane.common.problem_files import INTERNODE, OWN_PACKAGE, ProblemFile, folder_package, number_named, problem_files
from peerlane.errors import UnknownProblem, UsageError
from peerlane.problems.contract.spec import Problem

_MOST_BYTES = 16 << 20
"""of a problem's file"""


def numbers() -> tuple[int, ...]:
    """The numbers of all problems, ascending."""
    return tuple(problem_files())


def get(number: int) -> Problem:
    """The problem with this number; raises :class:`UnknownProblem`, and :class:`UsageError` if its file is not a problem's."""
    file = problem_files().get(number)
    if file is None:
        raise UnknownProblem(f"there is no problem {number}; `peerlane list` prints those there are")
    return _load(file)


@functools.cache
def _load(file: ProblemFile) -> Problem:
    if file.package == folder_package(file.path.parent) and file.package not in sys.modules:
        package = ModuleType(file.package, f"The problems in {file.path.parent}.")
        package.__path__ = [str(file.path.parent)]
        sys.modules[file.package] = package
    if file.package != OWN_PACKAGE:
        read_regular(file.path, _MOST_BYTES, follow=True)  # the import would say that there is no such module, or fill the memory
    try:
        module = importlib.import_module(f"{file.package}.{file.path.stem}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if file.package == OWN_PACKAGE:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file.path)]
        where = f", line {lines[-1]}," if lines else ""
        said = _text_of(error)
        raise UsageError(f"{shown_path(file.path)}{where} raised {type(error).__name__}: {said}; correct this file") from error
    problem = vars(module).get("PROBLEM")
    if not isinstance(problem, Problem):
        raise UsageError(f"{file.path} declares no problem: expected `PROBLEM = Problem(...)`, got {type(problem).__name__!a}")
    if (problem.id, problem.slug) != (file.number, file.slug):
        raise UsageError(
            f"{file.path} declares problem {problem.id} ({problem.slug}): expected {file.number} ({file.slug}), as its name says"
        )
    return problem


def _text_of(error: BaseException) -> str:
    """Returns what an error says; a terminal would obey some characters."""
    try:
        text = str(error)
    except BaseException:
        return "an error without a text"
    return text if text.isprintable() else ascii(text)


def named(text: str) -> Problem:
    """The problem with this number or slug; raises :class:`UnknownProblem`, with the closest slugs."""
    return get(number_named(text))


def all_problems(nodes: int | None = 1) -> tuple[Problem, ...]:
    """All problems that run on so many nodes, by number; ``None``: on any number."""
    return tuple(problem for problem in map(get, numbers()) if nodes is None or nodes in problem.nodes)


def suite(nodes: int | None = 1) -> tuple[Problem, ...]:
    """Those of them that come with peerlane: 87 on one node, and others on several."""
    own = {number for number, file in problem_files().items() if file.package in (OWN_PACKAGE, f"{OWN_PACKAGE}.{INTERNODE}")}
    return tuple(problem for problem in all_problems(nodes) if problem.id in own)


def select(text: str, nodes: int = 1) -> tuple[Problem, ...]:
    """Problems by number: ``"13"``, ``"1-8,13"``, or ``"all"`` that run on so many nodes. Ranges skip numbers that do not exist; single
    numbers must exist."""
    if text.strip() == "all":
        return all_problems(nodes)
    chosen: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise UsageError(f"cannot read problems {text!r}: expected numbers and ranges such as 1-8,13, or all")
        first, last = int(match[1]), int(match[2] or match[1])
        if match[2] is None and first not in problem_files():
            get(first)
        inside = [number for number in numbers() if first <= number <= last]
        if not inside:
            raise UnknownProblem(f"no problem lies in {part.strip()!r}; `peerlane list` prints those there are")
        chosen.update(dict.fromkeys(inside))
    return tuple(get(number) for number in sorted(chosen))
