"""The printed source of every reference, executed on its own, gives what the reference gives."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from peerlane import problems
from peerlane.problems import Problem
from peerlane.problems.contract import leaves, same_bits
from peerlane.problems.reference_source import reference_source
from problem_cases import drawing
from ranks.pool import with_groups

REFERENCES = [
    pytest.param(problem, variant, id=f"p{problem.id:03d}-{variant}") for problem in problems.all_problems() for variant in problem.variants
]


def define_reference(source: str) -> Callable[..., Any]:
    """The function that the printed source defines."""
    module = types.ModuleType("printed_reference")
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    exec(compile(source, "<printed reference>", "exec"), vars(module))
    return module.reference


def differences_on_rank(rank: int, world_size: int, number: int, variant: str, source: str) -> list[str]:
    """The cases of ``small`` in which the printed reference answers otherwise than the problem's."""
    problem, printed, different = problems.get(number), define_reference(source), []
    for case in problem.cases("small", world_size, variant)[:2]:
        answers = []
        for function in (problem.reference_of(variant), printed):
            args = with_groups(case, rank, problem.inputs(case, rank, drawing(case, rank)))
            answers.append(list(leaves(problem.answer(function(*args), args))))
        if len(answers[0]) != len(answers[1]) or not all(a.dtype == b.dtype and same_bits(a, b) for a, b in zip(*answers, strict=True)):
            different.append(case.key)
    return different


@pytest.mark.parametrize(("problem", "variant"), REFERENCES)
def test_printed_reference_stands_alone_and_agrees(problem: Problem, variant: str, rank_pool: Any) -> None:
    source = reference_source(problem, variant)
    assert "peerlane" not in source
    assert not any(rank_pool(2).run(differences_on_rank, problem.id, variant, source))


def test_a_printed_reference_that_differs_is_found(rank_pool: Any) -> None:
    source = reference_source(problems.get(1)).replace("dist.all_reduce(total)", "pass")
    assert all(rank_pool(2).run(differences_on_rank, 1, "default", source))
