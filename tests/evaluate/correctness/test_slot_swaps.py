"""Late changes: what a slot holds at its call, and which slots can exchange."""

import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from peerlane.evaluate import wire
from peerlane.evaluate.correctness.slot_swaps import MOST_BYTES, SlotSwaps, kinds_of_slots
from peerlane.evaluate.memory.slots import ArgumentSlots, place_slots
from peerlane.problems.contract import describe


@given(st.permutations(range(7)), st.lists(st.integers(0, 2), min_size=7, max_size=7), st.sets(st.integers(0, 6)))
def test_every_call_finds_what_contents_says(order: list[int], alike: list[int], positions: set[int]) -> None:
    drawn = SlotSwaps.draw(order, alike, positions)
    held, at_call, steps = list(range(7)), {}, {position: (slot, other) for position, slot, other in drawn.steps}
    for position, slot in enumerate(order):
        if position in steps:
            a, b = steps[position]
            assert a == slot and order.index(b) > position and alike[a] == alike[b]
            held[a], held[b] = held[b], held[a]
        at_call[slot] = held[slot]
    assert [at_call[slot] for slot in range(7)] == drawn.contents
    assert set(steps) <= positions


def test_nothing_is_exchanged_with_a_call_that_is_over_or_of_another_kind() -> None:
    assert SlotSwaps.draw([2, 0, 1], [0, 1, 2], range(3)) == SlotSwaps((), [0, 1, 2])
    assert SlotSwaps.draw([0, 1], [-1, -1], range(2)).steps == ()
    assert SlotSwaps.draw([1, 0], [0, 0], [0, 1]) == SlotSwaps(((0, 1, 0),), [1, 0])


def layout_of(*slots: tuple[Any, ...]) -> wire.CaseLayout:
    arguments, size = place_slots(map(describe, slots))
    outputs, _ = place_slots([describe(torch.empty(2))] * len(slots))
    return wire.CaseLayout({}, arguments, outputs, size, 0, {})


def test_where_slots_come_again_their_last_calls_contents_count() -> None:
    """A slot's contents are those that it has when it is called for the last time; nothing is exchanged with a slot behind that."""
    for _ in range(50):
        order = [slot for _ in range(4) for slot in random.sample(range(5), 5)]
        drawn = SlotSwaps.draw(order, [0] * 5, random.sample(range(1, 20), 8))
        contents, at_last_call = list(range(5)), [0] * 5
        steps = {position: (slot, other) for position, slot, other in drawn.steps}
        for position, slot in enumerate(order):
            if position in steps:
                one, other = steps[position]
                assert one == slot != other
                contents[one], contents[other] = contents[other], contents[one]
            at_last_call[slot] = contents[slot]
        assert at_last_call == drawn.contents and len(steps) >= 6


def test_slots_are_alike_where_they_are_on_every_rank() -> None:
    pair, longer, scaled = (torch.empty(3), 2), (torch.empty(4), 2), (torch.empty(3), 5)
    one, two = layout_of(pair, pair, longer, scaled), layout_of(pair, longer, longer, pair)
    assert kinds_of_slots([one]) == [0, 0, 1, 2]
    assert kinds_of_slots([one, two]) == [0, 1, 2, 3]
    assert kinds_of_slots([replace(one, input_bytes=5 * MOST_BYTES)]) == [-1] * 4


def test_exchanged_slots_hold_each_others_tensors_and_leave_the_rest_alone() -> None:
    slots = [(torch.full((3,), float(slot)), [torch.full((5,), slot, dtype=torch.int64)]) for slot in range(3)]
    layout, size = place_slots(map(describe, slots))
    data = torch.full((size,), 7, dtype=torch.uint8)
    arguments = ArgumentSlots(data, layout, str)
    arguments.fill(slots)
    before = data.clone()
    arguments.swapper(0, 2)()
    assert [[int(tensor[0]) for tensor in tensors] for tensors in arguments.tensors] == [[2, 2], [1, 1], [0, 0]]
    arguments.swappers([(1, 2, 0)])[1]()
    assert torch.equal(data, before)
