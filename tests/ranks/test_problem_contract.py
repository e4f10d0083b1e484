"""Every problem, every small case, world sizes 2 and 4: the reference passes its oracle, known wrong answers fail, alternative
solutions pass. Every change runs one case of each problem."""

from collections.abc import Iterator
from typing import Any

import pytest

from peerlane import problems
from peerlane.evaluate.memory.slots import describe_answer
from peerlane.problems.contract import Case, Problem, describe
from peerlane.problems.contract.calibration import Margins, margins, passing_faults, worst
from peerlane.problems.contract.count import cost_faults
from problem_cases import drawing
from ranks.pool import with_groups

_ALIKE_SLOTS = 4


def small_cases() -> Iterator[Any]:
    """Every case on 2 and on 4 ranks. The first of each problem is quick; of the others every third is slow on 4 and the rest on 2, and
    long the other way round."""
    for problem in problems.all_problems(None):
        floor: Any = ()
        for variant in problem.variants:
            sizes = [size for size in (2, 4) if size in problem.world_sizes]
            cases = {size: problem.cases("small", size, variant) for size in sizes}
            labels = list(dict.fromkeys(case.label for of_size in cases.values() for case in of_size))
            for number, label in enumerate(labels):
                found = [case for of_size in cases.values() for case in of_size if case.label == label]
                for case in found:
                    marks = floor if case is found[-1 if number % 3 == 2 else 0] else pytest.mark.long
                    yield pytest.param(problem, case, id=f"p{problem.id:03d}-{case.label}-w{case.world_size}", marks=marks)
                floor = pytest.mark.slow


def margins_on_rank(rank: int, world_size: int, number: int, preset: str, label: str) -> Margins:
    problem = problems.get(number)
    case = problem.case(preset, label, world_size)
    return margins(problem, case, rank, secret="test", resolve=lambda tree: with_groups(case, rank, tree), transport=False)


def presets_on_ranks() -> Iterator[Any]:
    """Every problem's small cases on 2 and on 4 ranks: half of the problems on 4 in the quick tests, the others on 2."""
    for number, problem in enumerate(problems.all_problems(None)):
        sizes = [size for size in (2, 4) if size in problem.world_sizes]
        for size in sizes:
            slow = [pytest.mark.long] if size != sizes[number % 2 - 1] else []
            yield pytest.param(problem, size, id=f"p{problem.id:03d}-w{size}", marks=slow)


@pytest.mark.parametrize(("problem", "world_size"), list(presets_on_ranks()))
def test_no_transport_fault_passes(problem: Problem, world_size: int) -> None:
    passing = {variant: passing_faults(problem, problem.cases("small", world_size, variant), secret="test") for variant in problem.variants}
    assert not any(passing.values()), f"they miss by less than ten times: mend a case, or excuse them with a reason: {passing}"


@pytest.mark.parametrize(("problem", "case"), list(small_cases()))
def test_case_is_sound(problem: Problem, case: Case, rank_pool: Any) -> None:
    found = worst(rank_pool(case.world_size).run(margins_on_rank, problem.id, case.preset, case.label))
    assert not found.complaints()
    assert not cost_faults([problem.cost(case, rank) for rank in range(case.world_size)], found.counts)
    if not problem.alternative_solutions:
        assert not any(found.reference.values()), "an answer that is not exact needs an alternative solution: is its tolerance fair?"


def unlike_answers(rank: int, world_size: int, number: int) -> list[str]:
    """The cases in which the reference gives outputs of other shapes for arguments of the same shapes on all ranks."""
    import torch.distributed as dist

    problem, unlike = problems.get(number), []
    for case in (case for variant in problem.variants for case in problem.cases("small", world_size, variant)):
        trees = [problem.inputs(case, rank, drawing(case, rank, slot, slot)) for slot in range(_ALIKE_SLOTS)]
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, list(map(describe, trees)))
        known: dict[str, Any] = {}
        for tree, key in zip(trees, map(repr, zip(*everyone, strict=True)), strict=True):
            args = with_groups(case, rank, tree)
            answer = describe_answer(problem.answer(problem.reference_of(case.variant)(*args), args))
            if known.setdefault(key, answer) != answer:
                unlike.append(case.key)
    return unlike


@pytest.mark.parametrize("problem", [item for item in problems.all_problems() if item.graph], ids=lambda p: f"p{p.id:03d}")
def test_where_the_reference_can_be_captured_contents_decide_no_shape(problem: Problem, rank_pool: Any) -> None:
    """Layouts of slots whose arguments are alike are found by one call."""
    assert rank_pool(2).run(unlike_answers, problem.id) == [[], []]


def test_where_contents_decide_shapes_it_shows(rank_pool: Any) -> None:
    assert all(rank_pool(2).run(unlike_answers, 67)), "the test above can fail"


@pytest.mark.parametrize("problem", problems.all_problems(None), ids=lambda p: f"p{p.id:03d}")
def test_problem_declares_everything(problem: Problem) -> None:
    names = [preset.name for preset in problem.presets]
    assert names[:2] == ["small", "pkb"] and len(names) >= 3 and len(set(names)) == len(names)
    families = [preset.family for preset in problem.presets[2:]]
    assert families == sorted(families) and families[0] == "production" and set(families) <= {"production", "sweep"}
    assert {2, 4} & set(problem.world_sizes), "runs on neither 2 nor 4 ranks"
    for preset in problem.presets:
        assert preset.about
        for world_size in problem.world_sizes:
            for case in problem.cases(preset.name, world_size):
                for rank in range(world_size):
                    cost = problem.cost(case, rank)
                    assert cost.hbm_bytes >= 0 and cost.egress_bytes >= 0 and cost.ingress_bytes >= 0
    assert any(problem.cases(item.name, 4) for item in problem.family("production")) or 4 not in problem.world_sizes, (
        "no production case for four ranks"
    )
    assert problem.graph or problem.graph_reason
    assert problem.title and problem.summary and problem.origin and problem.parallelism
    assert set(problem.updates) <= set(problem.parameters) and set(problem.mutates) <= set(problem.parameters)
