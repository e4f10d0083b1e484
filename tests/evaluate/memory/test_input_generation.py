"""How the slots of a block are drawn: one by one, or behind each other from the block's own generators."""

from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.evaluate.memory.layouts import Inputs
from peerlane.evaluate.memory.slots import strip_overlap
from peerlane.problems.contract import RANDOM, BlockGenerators, Case, Draw, Problem, describe

CPU = torch.device("cpu")


CASES = [
    pytest.param(
        problem,
        problem.cases("small", world_size),
        id=f"p{problem.id:03d}-w{world_size}",
        marks=pytest.mark.long if world_size != problem.world_sizes[0] else (),
    )
    for problem in problems.all_problems()
    for world_size in problem.world_sizes
]


@pytest.mark.parametrize(("problem", "cases"), CASES)
def test_slots_that_say_so_have_one_layout(problem: Problem, cases: list[Case]) -> None:
    for case in cases:
        for rank in range(case.world_size):
            drawn = [Inputs(problem, case, rank, "test", CPU).of(slot, slot) for slot in range(3)]
            layouts = [describe(strip_overlap(item.args)) for item in drawn]
            assert len({item.fixed for item in drawn}) == 1
            assert not drawn[0].fixed or layouts[0] == layouts[1] == layouts[2], f"{case.key}, rank {rank}"


def test_whoever_asks_for_the_layout_or_has_another_ask_is_not_fixed() -> None:
    def draw() -> Draw:
        return Draw(secret="a", case_key="1/small/case/w2", slot=0, block=0, rank=0)

    plain, asked, passed_on = draw(), draw(), draw()
    plain.normal((3,), torch.float32)
    plain.shared.normal((3,), torch.float32)
    asked.layout.random()
    passed_on.shared.layout.random()
    assert [plain.fixed, asked.fixed, passed_on.fixed] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "cases"), CASES)
def test_what_all_ranks_draw_alike_is_drawn_alike_behind_each_other_too(problem: Problem, cases: list[Case]) -> None:
    """A rank that drew more of it than another would have other contents in all slots that follow."""
    for case in cases:
        states = []
        for rank in range(case.world_size):
            generators = BlockGenerators(CPU)
            generators.begin(secret="test", case_key=case.key, block=3, rank=rank)
            for slot in range(2):
                Inputs(problem, case, rank, "test", CPU).of(slot, 3, RANDOM, generators)
            states.append(generators.shared.get_state())
        assert all(torch.equal(state, states[0]) for state in states), case.key


def _generators(**changed: Any) -> BlockGenerators:
    generators = BlockGenerators(CPU)
    generators.begin(**{"secret": "a", "case_key": "1/small/case/w2", "block": 4, "rank": 0, **changed})
    return generators


def test_a_blocks_generators_are_new_for_every_block_rank_and_secret() -> None:
    def drawn(**changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        generators = _generators(**changed)
        draw = Draw(secret="", case_key="", slot=0, block=0, rank=0, generators=generators)
        return draw.normal((64,), torch.float32), draw.shared.normal((64,), torch.float32)

    mine, shared = drawn()
    assert torch.equal(mine, drawn()[0]) and not torch.equal(mine, shared)
    assert torch.equal(shared, drawn(rank=1)[1]) and not torch.equal(mine, drawn(rank=1)[0])
    for changed in ({"block": 5}, {"secret": "b"}, {"case_key": "1/small/case/w4"}):
        other, other_shared = drawn(**changed)
        assert not torch.equal(mine, other) and not torch.equal(shared, other_shared)


@pytest.mark.parametrize("block", [3, 4])
def test_apart_takes_the_same_end_of_the_range_from_either_kind_of_generator(block: int) -> None:
    for secret in map(str, range(10)):
        who = {"secret": secret, "case_key": "1/small/case/w2", "block": block}
        alone = Draw(**who, slot=2, rank=0)
        behind = Draw(**who, slot=2, rank=0, generators=_generators(**who))
        ends = [bool((draw.apart((100,), low=-2.0, high=8.0) >= 3.0).all()) for draw in (alone, behind)]
        assert ends[0] == ends[1]


def test_every_block_is_new_and_its_slots_differ() -> None:
    problem = problems.get(1)
    inputs, generators = Inputs(problem, problem.cases("small", 2)[0], 0, "test", CPU), BlockGenerators(CPU)

    def drawn(block: int) -> torch.Tensor:
        generators.begin(secret="test", case_key=inputs.case.key, block=block, rank=0)
        return torch.cat([inputs.of(slot, block, RANDOM, generators).args[0].flatten() for slot in range(3)])

    found = [drawn(block) for block in range(4)]
    assert not any(torch.equal(a, b) for number, a in enumerate(found) for b in found[:number])
    assert torch.equal(drawn(0), found[0])
