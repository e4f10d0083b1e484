"""Small cases of solutions on emulated ranks."""

import ast
from dataclasses import replace
from pathlib import Path

from peerlane import problems, solutions
from peerlane.evaluate.correctness.emulated import EmulatedJudgement, judge_emulated
from peerlane.problems import Case, Problem

OVERWRITES = "The next call overwrites"
"""How a solution begins to say that its results do not last."""


def cases(problem: Problem, world_size: int) -> list[Case]:
    return list(problem.cases("small", world_size))


def judge(file: Path, number: int, case: Case, *, schedules: int = 4) -> EmulatedJudgement:
    return judge_emulated(file, problems.get(number), case, schedules=schedules)


def judge_case(
    number: int, label: str, world_size: int = 2, schedules: int = 4, *, file: Path | None = None, **sizes: object
) -> EmulatedJudgement:
    """Judges a problem's own solution, or a ``file``, on one small case with other ``sizes``."""
    case = problems.get(number).case("small", label, world_size)
    return judge(file or solutions.files()[number], number, replace(case, params={**case.params, **sizes}), schedules=schedules)


def require_correct(judged: EmulatedJudgement) -> None:
    if judged.outcome.failure is not None:
        raise judged.outcome.failure[1]
    assert judged.correct, str(judged)
    if judged.outcome.aliased:
        said = ast.get_docstring(ast.parse(judged.file.read_text(encoding="utf-8"))) or ""
        assert OVERWRITES in said, f"{judged.file.name} gives out memory that its next call overwrites, and does not say so: {OVERWRITES!r}"
