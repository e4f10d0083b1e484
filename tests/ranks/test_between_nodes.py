"""Solutions between nodes on CPU ranks: right in every small case."""

from typing import Any

import pytest

from peerlane import problems, solutions
from peerlane.problems.contract import Draw, resolve_groups
from peerlane.problems.contract.calibration import ratios_of
from ranks.pool import groups_of


def ratios_on_rank(rank: int, world_size: int, number: int, label: str) -> dict[str, float]:
    problem = problems.get(number)
    case = problem.case("small", label, world_size)
    layout = tuple((name, tuple(tuple(members) for members in each)) for name, each in problem.process_groups(case).items())
    groups = groups_of(layout, rank)
    draws = [Draw(secret="test", case_key=case.key, slot=0, block=0, rank=peer) for peer in range(world_size)]
    inputs = [problem.inputs(case, peer, draw) for peer, draw in enumerate(draws)]
    expected = problem.oracle(case, inputs, rank)
    args = resolve_groups(inputs[rank], groups.__getitem__)
    answer = problem.answer(solutions.load(number)(*args), args)
    return ratios_of(problem, case, answer, expected)


@pytest.mark.parametrize("number", [number for number in solutions.files() if problems.get(number).category == "internode"])
def test_solution_is_right_in_every_small_case(number: int, rank_pool: Any) -> None:
    for case in problems.get(number).cases("small", 4):
        for ratios in rank_pool(4).run(ratios_on_rank, number, case.label):
            assert all(ratio <= 1 for ratio in ratios.values()), (case.name, ratios)
