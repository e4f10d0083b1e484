"""The judge that trusted ranks and races in this process have in common."""

import dataclasses
import math

import torch

from peerlane import problems
from peerlane.evaluate.correctness.judge import changed_names, compare_arguments, judge_output
from peerlane.problems import RANDOM
from peerlane.problems.contract import Score, map_leaves

PROBLEM = problems.get(1)
CASE = PROBLEM.cases("small", 2)[0]


def test_a_ratio_that_is_no_number_is_wrong() -> None:
    problem = dataclasses.replace(PROBLEM, compare=lambda *_: [Score("first", 0.5, ""), Score("second", math.nan, "")], replicated=())
    judged = judge_output(problem, CASE, None, None, RANDOM)
    assert judged.worst.output == "second" and judged.worst.ratio == math.inf and not judged.worst.passed


def test_arguments_are_compared_with_what_their_slot_was_given() -> None:
    """Slots 0 and 1 have exchanged contents; a call has changed the weight, which it may not, and the counter, which it may."""
    problem = dataclasses.replace(PROBLEM, reference=lambda weight, counter, scale: None, mutates=frozenset({"counter"}))
    generated = [(torch.full((3,), float(slot)), [torch.empty(0), torch.full((2,), slot)], 5) for slot in range(2)]
    now = [tuple(map_leaves(item, torch.clone) for item in generated[other]) for other in (1, 0)]

    def changed(*slots: tuple[int, int]) -> list[str]:
        return changed_names([flag for source, slot in slots for flag in compare_arguments(problem, generated[source], now[slot])])

    now[0][1][1].add_(1)
    assert changed((1, 0), (0, 1)) == []
    now[0][0][2] = -0.0
    now[1][0][2] = -0.0
    assert changed((1, 0), (0, 1)) == ["weight"]
    assert changed((0, 0)) == ["weight"] and changed() == []
