"""Layouts of slots: found once, the same however many slots follow, forgotten with the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peerlane.evaluate.memory import layouts
from peerlane.evaluate.memory.input_generation import Drawn
from peerlane.evaluate.memory.layouts import KnownLayouts
from peerlane.evaluate.memory.slots import ArgumentSlots, end_of
from peerlane.problems.contract import Case, describe

CASE = Case(problem=1, preset="small", label="a", world_size=2, dtype=torch.float32)
OTHER = Case(problem=1, preset="small", label="b", world_size=2, dtype=torch.float32)


class Made:
    """A problem whose slots differ in size, ``apart`` of them, and what was asked of it. ``fixed``: its slots say that they do not."""

    def __init__(self, number: int = 1, *, apart: int = 100, fixed: bool = False, graph: bool = True) -> None:
        self.id, self.drawn, self.called = number, list[int](), list[int]()
        self.apart, self.fixed, self.graph = apart, fixed, graph

    def draw(self, slots: Iterable[int]) -> list[Drawn]:
        return [Drawn(self._inputs(slot), self.fixed) for slot in slots]

    def _inputs(self, slot: int) -> tuple[Any, ...]:
        self.drawn.append(slot)
        counts = torch.full((1, 2), slot, dtype=torch.int32).expand(4, 2)
        return torch.full((slot % self.apart + 3,), float(slot)), [counts], "world", 7

    def reference_of(self, variant: str) -> Callable[..., torch.Tensor]:
        return self._reference

    def _reference(self, x: torch.Tensor, counts: list[torch.Tensor], group: str, number: int) -> torch.Tensor:
        assert bool((x == float(counts[0][0, 0])).all()) and (group, number) == ("world", 7), "called on what was drawn"
        self.called.append(int(x[0]))
        return x.repeat(2).to(torch.bfloat16)

    def answer(self, output: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        return output


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rank 0 of two; the other one has the same layouts. Counts what is gathered."""
    seen = SimpleNamespace(gathered=0)

    def gather(everyone: list[Any], mine: Any) -> None:
        seen.gathered += 1
        everyone[:] = [mine for _ in everyone]

    monkeypatch.setattr(layouts.dist, "all_gather_object", gather)
    return seen


def _ask(known: KnownLayouts, made: Made, slots: int, case: Case = CASE) -> layouts.Layouts:
    return known.of(made, case, slots, made.draw, {})  # type: ignore[arg-type]


def _known() -> KnownLayouts:
    return KnownLayouts(0, 2, torch.device("cpu"))


def test_slots_are_drawn_and_called_once_however_often_a_case_is_opened(alone: SimpleNamespace) -> None:
    known, made = _known(), Made()
    four = _ask(known, made, 4)
    assert made.drawn == made.called == [0, 1, 2, 3] and alone.gathered == 1
    assert _ask(known, made, 2).arguments == [mine[:2] for mine in four.arguments]
    six = _ask(known, made, 6)
    assert made.drawn == made.called == [0, 1, 2, 3, 4, 5] and alone.gathered == 2
    assert [mine[:4] for mine in six.arguments] == four.arguments and six.outputs[:4] == four.outputs
    assert [len(four.outputs), *map(len, four.arguments)] == [4, 4, 4]


def test_slots_found_one_after_the_other_lie_where_they_lie_when_found_together() -> None:
    step, whole = _known(), _known()
    for slots in (1, 2, 5, 9):
        found = _ask(step, Made(), slots)
    assert found == _ask(whole, Made(), 9)
    for layout in (found.arguments[0], found.outputs):
        memory = torch.zeros(end_of(layout), dtype=torch.uint8)
        slots = ArgumentSlots(memory, [item if "items" in item else {"kind": "list", "items": [item]} for item in layout], str)
        for number, tensors in enumerate(slots.tensors):
            for tensor in tensors:
                assert not tensor.any(), "two tensors share memory"
                tensor.fill_(number + 1)


def test_cases_are_told_apart_and_another_problem_is_found_anew() -> None:
    known, made, other = _known(), Made(), Made(2)
    _ask(known, made, 2)
    _ask(known, made, 1, OTHER)
    _ask(known, made, 2)
    assert made.drawn == [0, 1, 0]
    _ask(known, other, 1)
    _ask(known, made, 1)
    assert other.drawn == [0] and made.drawn == [0, 1, 0, 0]


@pytest.mark.parametrize(("fixed", "graph"), [(False, True), (False, False), (True, True), (True, False)])
def test_what_is_alike_is_drawn_and_called_once_where_that_is_certain(fixed: bool, graph: bool) -> None:
    known, made = _known(), Made(apart=1 if fixed else 3, fixed=fixed, graph=graph)
    found = _ask(known, made, 7)
    assert made.called == (list(range(7)) if not graph else [0] if fixed else [0, 1, 2])
    assert made.drawn == ([0] if fixed and graph else list(range(7)))
    assert found == _ask(_known(), Made(apart=made.apart, graph=False), 7)
    before = len(made.called)
    assert _ask(known, made, 9) == _ask(_known(), Made(apart=made.apart, graph=False), 9)
    assert len(made.called) == before + (0 if graph else 2)


def test_slots_are_not_alike_where_another_rank_has_other_arguments_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, [describe(torch.empty(slot % 2)) for slot in range(6)]]

    monkeypatch.setattr(layouts.dist, "all_gather_object", gather)
    known, made = _known(), Made(apart=1, fixed=True)
    _ask(known, made, 6)
    assert made.drawn == made.called == [0, 1]
