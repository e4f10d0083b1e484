"""Layouts of slots: what is alike is drawn and called once, and no two tensors share memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peerlane.evaluate.memory import layouts
from peerlane.evaluate.memory.layouts import FEWEST_SLOTS, Drawn, find_layouts, slots_that_fit
from peerlane.evaluate.memory.slots import ArgumentSlots
from peerlane.problems.contract import Case, describe

CASE = Case(problem=1, preset="small", label="a", world_size=2, dtype=torch.float32)


class Made:
    """Inputs of a problem whose slots differ in size, ``apart`` of them, and what was asked of it. ``fixed``: they say that they do not."""

    case, device, rank, variant = CASE, torch.device("cpu"), 0, "default"

    def __init__(self, *, apart: int = 100, fixed: bool = False, graph: bool = True) -> None:
        self.drawn, self.called = list[int](), list[int]()
        self.apart, self.fixed, self.graph, self.problem = apart, fixed, graph, self

    def of(self, slot: int, block: int) -> Drawn:
        self.drawn.append(slot)
        counts = torch.full((1, 2), slot, dtype=torch.int32).expand(4, 2)
        return Drawn((torch.full((slot % self.apart + 3,), float(slot)), [counts], "world", 7), self.fixed)

    def reference_of(self, variant: str) -> Callable[..., torch.Tensor]:
        return self._reference

    def _reference(self, x: torch.Tensor, counts: list[torch.Tensor], group: str, number: int) -> torch.Tensor:
        assert bool((x == float(counts[0][0, 0])).all()) and (group, number) == ("world", 7), "called on what was drawn"
        self.called.append(int(x[0]))
        return x.repeat(2).to(torch.bfloat16)

    def answer(self, output: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        return output


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two; the other one has the same layouts."""
    monkeypatch.setattr(layouts.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(layouts.dist, "all_gather_object", lambda everyone, mine: everyone.__setitem__(slice(None), [mine] * 2))


def find(made: Made, slots: int, most_bytes: float = 1e9) -> layouts.Layouts:
    return find_layouts(made, slots, most_bytes, {})  # type: ignore[arg-type]


def test_no_two_tensors_share_memory() -> None:
    found = find(Made(), 9)
    assert [len(found.outputs), *map(len, found.arguments)] == [9, 9, 9]
    for layout, size in ((found.arguments[0], found.input_bytes), (found.outputs, found.output_bytes)):
        memory = torch.zeros(size, dtype=torch.uint8)
        slots = ArgumentSlots(memory, [item if "items" in item else {"kind": "list", "items": [item]} for item in layout], str)
        for number, tensors in enumerate(slots.tensors):
            for tensor in tensors:
                assert not tensor.any(), "two tensors share memory"
                tensor.fill_(number + 1)


@pytest.mark.parametrize(("fixed", "graph"), [(False, True), (False, False), (True, True), (True, False)])
def test_what_is_alike_is_drawn_and_called_once_where_that_is_certain(fixed: bool, graph: bool) -> None:
    made = Made(apart=1 if fixed else 3, fixed=fixed, graph=graph)
    found = find(made, 7)
    assert made.called == (list(range(7)) if not graph else [0] if fixed else [0, 1, 2])
    again = [1, 2] if graph and not fixed else []  # the first of their kinds: the arguments of one slot at a time are held
    assert made.drawn == ([0] if fixed and graph else [*range(7), *again])
    other = find(Made(apart=made.apart, graph=False), 7)
    assert (found.arguments, found.outputs) == (other.arguments, other.outputs)


def test_slots_that_take_too_much_memory_are_fewer() -> None:
    one = find(Made(apart=1, fixed=True), FEWEST_SLOTS).input_bytes / FEWEST_SLOTS
    assert len(find(Made(apart=1, fixed=True), 100, most_bytes=20 * one).outputs) in range(10, 21)
    assert len(find(Made(apart=1, fixed=True), 100, most_bytes=1.0).outputs) == FEWEST_SLOTS


def test_slots_are_not_alike_where_another_rank_has_other_arguments_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[Any], mine: Any) -> None:
        theirs = (
            (describe(torch.empty(0)), False, 100) if isinstance(mine, tuple) else [describe(torch.empty(slot % 2)) for slot in range(6)]
        )
        everyone[:] = [mine, theirs]

    monkeypatch.setattr(layouts.dist, "all_gather_object", gather)
    made = Made(apart=1, fixed=True)
    find(made, 6)
    assert made.called == [0, 1]


def test_large_slots_are_two_and_small_ones_at_least_four() -> None:
    assert [slots_that_fit(25, size, 512 << 20) for size in (1 << 20, 64 << 20, 200 << 20, 512 << 20, 1 << 30)] == [25, 8, 4, 4, 2]
