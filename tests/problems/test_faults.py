"""Transport faults are made from a problem's own oracle: what each changes, where it applies, and that one which passes is found."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems.contract import (
    AnswerContext,
    Case,
    Cost,
    Expected,
    GroupLayout,
    Inputs,
    Problem,
    any_order,
    case,
    exactly,
    known_wrong_answers,
    preset,
    rounded,
    transport_faults,
    wrong,
)
from peerlane.problems.contract.calibration import passing_faults
from peerlane.problems.contract.faults import TAIL, TRANSPORT_FAULTS, DoesNotApply
from problem_cases import members

FAULTS = {item.name: item for item in TRANSPORT_FAULTS}
LENGTH = 2 * TAIL


def _groups(case: Case) -> GroupLayout:
    return {"strided": [range(first, case.world_size, 2) for first in (0, 1)]} if "group" in case.params else {}


def _gathered(case: Case, inputs: Inputs, rank: int) -> Expected:
    return exactly("all", torch.cat([inputs[q][0] for q in members(case, rank)]))


GATHER = dataclasses.replace(
    problems.get(2),
    oracle=_gathered,
    inputs=lambda case, rank, draw: (draw.normal((LENGTH,), torch.float32),),
    cost=lambda case, rank: Cost(0.0, 1.0, 1.0),
    process_groups=_groups,
    presets=(preset("small", "a row", case("world", torch.float32), case("strided", torch.float32, group="strided", world_sizes=(4,))),),
    known_wrong_answers=(),
)


def faulty(name: str, rank: int = 0, label: str = "world", problem: Problem = GATHER) -> torch.Tensor:
    """The answer of four ranks with messages 1, 2, 3 and 4, which were -1, -2, -3 and -4 before; a row per rank that has a part in it."""
    case = problem.case("small", label, 4)
    now, before = ([(torch.full((LENGTH,), sign * (q + 1.0)),) for q in range(4)] for sign in (1, -1))
    answers: Mapping[int, Any] = {rank: rounded(problem.oracle(case, now, rank))}
    context = AnswerContext(case, rank, now, answers, rounded(problem.oracle(case, before, rank)), problem, before)
    answer: torch.Tensor = FAULTS[name].answer(context)
    return answer.view(-1, LENGTH)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("no_communication", [1, 0, 0, 0], [1, 0, 0, 0]),
        ("own_repeated", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("drop_last_rank", [1, 2, 3, 0], [1, 2, 3, 0]),
        ("late_messages", [1, -2, -3, -4], [1, -2, -3, -4]),
        ("late_rank", [1, 2, 3, -4], [1, 2, 3, -4]),
        ("tails_lost", [1, 2, 3, 4], [1, 0, 0, 0]),
        ("stale_tail", [1, 2, 3, 4], [1, 2, 3, -4]),
        ("neighbours_exchanged", [1, 2, 4, 3], [1, 2, 4, 3]),
        ("ranks_reversed", [4, 3, 2, 1], [4, 3, 2, 1]),
    ],
)
def test_a_fault_changes_what_its_name_says(name: str, first: list[int], last: list[int]) -> None:
    answer = faulty(name)
    assert answer[:, 0].tolist() == first and answer[:, -1].tolist() == last


def test_a_ring_begins_with_the_own_message() -> None:
    assert faulty("ring_order", rank=2)[:, 0].tolist() == [3, 4, 1, 2]


def test_groups_are_ignored_or_mistaken_for_blocks() -> None:
    assert faulty("whole_world", label="strided")[:, 0].tolist() == [1, 2, 3, 4]
    assert [faulty("contiguous_group", rank, "strided")[:, 0].tolist() for rank in range(4)] == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_eight_bits_leave_errors_in_other_ranks_messages_alone() -> None:
    with pytest.raises(DoesNotApply, match="changes no message"):
        faulty("eight_bits")  # one number has a code of its own
    own, other = (torch.rand(LENGTH) for _ in range(2))
    context = AnswerContext(GATHER.case("small", "world", 2), 0, [(own,), (other,)], {}, None, GATHER, [(own,), (other,)])
    got = FAULTS["eight_bits"].answer(context)
    assert torch.equal(got[:LENGTH], own) and 0 < (got[LENGTH:] - other).abs().max() < 1 / 127


@pytest.mark.parametrize(
    ("name", "rank", "label", "changes"),
    [
        ("drop_last_rank", 3, "world", {}),
        ("ring_order", 0, "world", {}),
        ("whole_world", 0, "world", {}),
        ("contiguous_group", 0, "world", {}),
        ("no_communication", 0, "world", {"cost": lambda case, rank: Cost(0.0, 1.0, 0.0)}),
    ],
)
def test_a_fault_that_changes_nothing_does_not_apply(name: str, rank: int, label: str, changes: dict[str, Any]) -> None:
    with pytest.raises(DoesNotApply):
        faulty(name, rank, label, dataclasses.replace(GATHER, **changes))


def test_contradictory_arguments_are_no_answer() -> None:
    def sized(case: Case, inputs: Inputs, rank: int) -> Expected:
        if not all(args[0].any() for args in inputs):
            raise ValueError("a rank with nothing to say")
        return _gathered(case, inputs, rank)

    with pytest.raises(DoesNotApply, match="nothing to say"):
        faulty("no_communication", problem=dataclasses.replace(GATHER, oracle=sized))


def test_a_fault_that_passes_is_found_unless_excused() -> None:
    cases = GATHER.cases("small", 4)
    assert passing_faults(GATHER, cases, secret="unit") == {}
    blind = dataclasses.replace(GATHER, oracle=lambda case, inputs, rank: exactly("own", inputs[rank][0]))
    assert set(passing_faults(blind, cases, secret="unit")) >= {"no_communication", "late_messages", "eight_bits", "tails_lost"}
    total = dataclasses.replace(
        GATHER, oracle=lambda case, inputs, rank: exactly("sum", torch.stack([args[0].round() for args in inputs]).sum(0))
    )
    order = any_order("a sum has no order")
    found = set(passing_faults(total, cases, secret="unit"))
    assert found >= set(order)
    assert not found & set(passing_faults(dataclasses.replace(total, excused=order), cases, secret="unit")) & set(order)


def test_an_excuse_for_one_case_leaves_the_others() -> None:
    blind = dataclasses.replace(GATHER, oracle=lambda case, inputs, rank: exactly("own", inputs[rank][0]))
    every = {f"no_communication@small/{label}": "nobody looks" for label in ("world", "strided")}
    for excused, found in ((every, False), (dict(list(every.items())[:1]), True)):
        problem = dataclasses.replace(blind, excused=excused)
        assert ("no_communication" in passing_faults(problem, problem.cases("small", 4), secret="unit")) is found


def test_what_a_problem_writes_by_hand_takes_the_faults_place() -> None:
    by_hand = dataclasses.replace(GATHER, known_wrong_answers=(wrong("late_rank", "written by hand", lambda c: c.answer),))
    assert {item.name for item in transport_faults(GATHER)} - {item.name for item in transport_faults(by_hand)} == {"late_rank"}
    with pytest.raises(ValueError, match="excuses unknown known wrong answers: \\['no_such_fault'\\]"):
        known_wrong_answers(dataclasses.replace(GATHER, excused={"no_such_fault": "a reason"}))
