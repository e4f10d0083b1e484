"""Solutions between nodes on CPU ranks: right in every small case."""

from typing import Any

import pytest

from peerlane import problems, solutions
from peerlane.problems.contract.calibration import ratios_of
from problem_cases import drawn
from ranks.pool import with_groups


def ratios_on_rank(rank: int, world_size: int, number: int, label: str) -> dict[str, float]:
    problem = problems.get(number)
    case, inputs = drawn(number, label, world_size)
    expected = problem.oracle(case, inputs, rank)
    args = with_groups(case, rank, inputs[rank])
    answer = problem.answer(solutions.load(number)(*args), args)
    return ratios_of(problem, case, answer, expected)


@pytest.mark.parametrize("number", [number for number in solutions.files() if problems.get(number).category == "internode"])
def test_solution_is_right_in_every_small_case(number: int, rank_pool: Any) -> None:
    for case in problems.get(number).cases("small", 4):
        for ratios in rank_pool(4).run(ratios_on_rank, number, case.label):
            assert all(ratio <= 1 for ratio in ratios.values()), (case.name, ratios)
