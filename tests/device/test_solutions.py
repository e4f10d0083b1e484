"""Expert solutions are found as candidates and have their problems' signatures."""

import inspect

import pytest

from peerlane import problems, solutions
from peerlane.errors import UnknownProblem
from peerlane.evaluate import discover


def test_the_word_solutions_finds_every_file_and_its_problem() -> None:
    found = discover(["solutions"])
    assert {candidate.problem: candidate.path for candidate in found} == solutions.files()
    assert set(range(1, 9)) <= set(solutions.files()) and all(
        candidate.backend == "cuda" for candidate in found if candidate.problem in range(1, 9)
    )


@pytest.mark.parametrize("number", solutions.files())
def test_a_solution_has_the_problem_s_name_and_signature(number: int) -> None:
    problem = problems.get(number)
    assert solutions.files()[number].stem == f"p{number:03d}_{problem.slug}"
    wanted, got = (inspect.signature(function).parameters for function in (problem.reference, solutions.load(number)))
    assert [(item.name, item.default) for item in got.values()] == [(item.name, item.default) for item in wanted.values()]


def test_a_problem_without_a_solution_is_named() -> None:
    with pytest.raises(UnknownProblem, match="problem 999 has no solution here; those with one: 1, 2"):
        solutions.load(999)
