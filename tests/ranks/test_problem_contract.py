"""Every problem, every small case, world sizes 2 and 4: the reference passes its oracle, null answers fail, honest variants pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems._draw import INTEGER, RANDOM, Draw
from peerlane.problems._judge import expected_leaves, null_answers, rounded, score, type_mismatch
from peerlane.problems._spec import Case, NullContext, Problem
from peerlane.problems._tree import leaves, map_leaves, resolve_groups

SMALL = [
    pytest.param(problem, case, id=f"p{problem.id:03d}-{case.label}-w{world_size}")
    for problem in problems.all_problems()
    for world_size in (2, 4)
    for case in problem.cases("small", world_size)
]


def draw(case: Case, rank: int, kind: str, block: int = 0) -> Draw:
    return Draw(secret="test", case_key=case.key, slot=0, block=block, rank=rank, kind=kind)


def all_inputs(problem: Problem, case: Case, kind: str, block: int = 0) -> list[tuple[Any, ...]]:
    return [problem.inputs(case, rank, draw(case, rank, kind, block)) for rank in range(case.world_size)]


def kinds(problem: Problem) -> tuple[str, ...]:
    return (RANDOM, INTEGER) if problem.integer_exact else (RANDOM,)


def run_reference(rank: int, world_size: int, number: int, preset: str, label: str, kind: str) -> Any:
    """On a gloo rank: the reference's output, and whether it left its inputs alone."""
    import torch.distributed as dist

    problem = problems.get(number)
    case = problem.case(preset, label, world_size)
    groups = {}
    for name, layout in problem.process_groups(case).items():
        for members in layout:
            group = dist.new_group(list(members))
            if rank in members:
                groups[name] = group
    args = problem.inputs(case, rank, draw(case, rank, kind))
    before = map_leaves(args, torch.clone)
    output = problem.reference(*resolve_groups(args, groups.__getitem__))
    changed = [
        problem.parameters[i]
        for i, (a, b) in enumerate(zip(args, before, strict=True))
        for x, y in zip(leaves(a), leaves(b), strict=True)
        if not torch.equal(x.contiguous().view(torch.uint8) if x.dim() else x, y.contiguous().view(torch.uint8) if y.dim() else y)
    ]
    return map_leaves(output, lambda t: t.detach().clone()), changed


@pytest.mark.parametrize(("problem", "case"), SMALL)
def test_reference_meets_the_oracle(problem: Problem, case: Case, rank_pool: Any) -> None:
    for kind in kinds(problem):
        inputs = all_inputs(problem, case, kind)
        answers = rank_pool(case.world_size).run(run_reference, problem.id, case.preset, case.label, kind)
        for rank, (got, changed) in enumerate(answers):
            assert set(changed) <= problem.mutates, f"rank {rank} changed its inputs {changed}"
            expected = problem.oracle(case, inputs, rank)
            assert type_mismatch(got, expected) is None
            for item in score(problem, case, got, expected, kind):
                assert item.passed, f"rank {rank}, {kind}: {item}"
        if problem.replicated:
            first = list(leaves(answers[0][0]))
            for got, _ in answers[1:]:
                for a, b in zip(first, leaves(got), strict=True):
                    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def passes(problem: Problem, case: Case, answers: list[Any], expected: list[Any], kind: str) -> bool:
    """As the evaluator decides: right on every rank."""
    return all(
        type_mismatch(got, want) is None and all(item.passed for item in score(problem, case, got, want, kind))
        for got, want in zip(answers, expected, strict=True)
    )


@pytest.mark.parametrize(("problem", "case"), SMALL)
def test_null_answers_fail(problem: Problem, case: Case) -> None:
    inputs = all_inputs(problem, case, RANDOM)
    expected = [problem.oracle(case, inputs, rank) for rank in range(case.world_size)]
    if all(leaf.value.numel() == 0 for item in expected for leaf in expected_leaves(item)):
        return  # an empty answer has no wrong contents
    previous_inputs = all_inputs(problem, case, RANDOM, block=1)
    answers = [rounded(item) for item in expected]
    assert passes(problem, case, answers, expected, RANDOM), "the rounded oracle must pass its own tolerance"
    for null in null_answers(problem):
        if null.cases is not None and f"{case.preset}/{case.label}" not in null.cases:
            continue
        wrong = [
            null.answer(NullContext(case, rank, inputs, answers, rounded(problem.oracle(case, previous_inputs, rank))))
            for rank in range(case.world_size)
        ]
        assert not passes(problem, case, wrong, expected, RANDOM), f"null answer {null.name!r} passes"


@pytest.mark.parametrize(("problem", "case"), SMALL)
def test_honest_variants_pass(problem: Problem, case: Case) -> None:
    for kind in kinds(problem):
        inputs = all_inputs(problem, case, kind)
        for variant in problem.honest_variants:
            for rank in range(case.world_size):
                expected = problem.oracle(case, inputs, rank)
                got = variant.answer(case, inputs, rank)
                assert type_mismatch(got, expected) is None
                for item in score(problem, case, got, expected, kind):
                    assert item.ratio <= 0.5 or (kind == INTEGER and item.passed), f"{variant.name}, rank {rank}: {item}"


@pytest.mark.parametrize("problem", problems.all_problems(), ids=lambda p: f"p{p.id:03d}")
def test_problem_declares_everything(problem: Problem) -> None:
    names = [preset.name for preset in problem.presets]
    assert names[:2] == ["small", "pkb"] and len(names) >= 3 and len(set(names)) == len(names)
    assert all(name.startswith("production_") for name in names[2:])
    for preset in problem.presets:
        assert preset.about
        for world_size in problem.world_sizes:
            for case in problem.cases(preset.name, world_size):
                for rank in range(world_size):
                    cost = problem.cost(case, rank)
                    assert cost.hbm_bytes >= 0 and cost.egress_bytes >= 0 and cost.ingress_bytes >= 0
    assert problem.graph or problem.graph_reason
    assert problem.title and problem.summary and problem.origin and problem.parallelism
