"""Slots: what is filled in is what was given, however many tensors are copied at a time."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from peerlane.evaluate.memory import slots
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, place_slots, strip_overlap
from peerlane.problems.contract import Tree, describe, leaves, linear_over


def _tree(number: float) -> Tree:
    """Several dtypes, an expanded tensor, a transposed and an empty one, a module and a value."""
    return (
        torch.full((3, 5), number).t(),
        torch.full((4,), number, dtype=torch.bfloat16),
        torch.full((3, 1), number, dtype=torch.bfloat16).expand(3, 2),
        [torch.empty(0), torch.tensor(int(number)), 7],
        linear_over(torch.full((2, 3), number), torch.full((2,), -number)),
        {"alone": linear_over(torch.full((2, 3), 2 * number), None)},
    )


def _slots_of(trees: list[Tree]) -> ArgumentSlots:
    layout, size = place_slots(describe(strip_overlap(tree)) for tree in trees)
    return ArgumentSlots(torch.zeros(size, dtype=torch.uint8), layout, str)


@pytest.mark.parametrize("held_bytes", [0, 100, 1 << 20])
def test_slots_hold_what_they_were_filled_with(held_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_HELD_BYTES", held_bytes)
    trees = [_tree(float(number)) for number in range(1, 6)]
    private = _slots_of(trees)
    private.fill(trees[:4])
    for tree, filled in zip(trees, private.args[:4], strict=False):
        assert all(torch.equal(a, b) for a, b in zip(leaves(tree), leaves(filled), strict=True))
    assert not any(tensor.any() for tensor in private.tensors[4])


class _Counted(TorchDispatchMode):
    copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += "copy" in function.name()
        return function(*args, **(kwargs or {}))


def test_tensors_are_copied_many_at_a_time() -> None:
    trees = [_tree(float(number)) for number in range(50)]
    private = _slots_of(trees)
    with _Counted() as counted:
        private.fill(trees)
    assert counted.copies == 3  # one for each of float32, bfloat16 and int64


@pytest.mark.parametrize(
    ("again", "aliased"),
    [
        (lambda first, second: (first, second), True),
        (lambda first, second: (first.clone(), second), True),
        (lambda first, second: (second, first.clone()), True),  # also as another output
        (lambda first, second: (first.clone(), second.clone()), False),
        (lambda first, second: (first.clone(), torch.empty(0)), False),
    ],
    ids=["all", "one", "another", "none", "empty"],
)
def test_one_output_in_the_last_calls_place_is_aliased(again: Any, aliased: bool) -> None:
    layout, size = place_slots([describe((torch.empty(2), torch.empty(2)))] * 2)
    outputs, kept = OutputRegions(torch.zeros(size, dtype=torch.uint8), layout, torch.device("cpu")), (torch.zeros(2), torch.ones(2))
    returned = again(*kept)
    outputs.take(0, kept, ())
    outputs.take(1, returned, ())
    assert outputs.aliased([0, 1]) is aliased


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_slots_change_places_with_a_few_copies_of_many_tensors(small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_SMALL_BYTES", small_bytes)
    trees = [([torch.full((3 + i,), float(number + i), dtype=torch.bfloat16) for i in range(30)],) for number in (0, 100)]
    private = _slots_of(trees)
    private.fill(trees)
    exchange = private.swapper(0, 1)
    with _Counted() as counted:
        exchange()
    for tree, held in zip(reversed(trees), private.args, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(leaves(tree), leaves(held), strict=True))
    assert (counted.copies == 6) == bool(small_bytes)  # three of regions that are words of eight bytes, three of the others
    exchange()
    assert all(torch.equal(a, b) for a, b in zip(leaves(trees[0]), leaves(private.args[0]), strict=True))


def test_outputs_of_many_tensors_are_copied_together() -> None:
    answer = [torch.full((i, 2), float(i)).t() for i in range(20)]
    layout, size = place_slots([describe([tensor.contiguous() for tensor in answer])])
    regions = OutputRegions(torch.zeros(size, dtype=torch.uint8), layout, torch.device("cpu"))
    with _Counted() as counted:
        regions.take(0, answer, ())
    assert counted.copies == 1 and all(torch.equal(a, b) for a, b in zip(regions.views[0], answer, strict=True))
