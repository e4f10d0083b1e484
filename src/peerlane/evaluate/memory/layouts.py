"""The inputs of a case, and the layout of its slots in memory: the sizes of what is drawn for them, and of what the reference answers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from peerlane.evaluate.memory.slots import ArgumentSlots, describe_answer, place_slots, strip_overlap
from peerlane.problems.contract.draw import RANDOM, BlockGenerators, Draw
from peerlane.problems.contract.spec import Case, Problem
from peerlane.problems.contract.tree import Description, Tree, describe

FEWEST_SLOTS = 4
"""The fewest slots of a case, as long as they take no more than ``MOST_OF_FEWEST_BYTES``."""
FEWEST_LARGE_SLOTS = 2
"""The fewest slots of a case, however much memory they take: an answer that is right in one must not be right in the other."""
MOST_OF_FEWEST_BYTES = 2 << 30


_USUAL_CALLS = 2
"""Calls of the reference behind its first one, on a GPU: how many calls a timed block takes follows from the shortest."""


class Drawn(NamedTuple):
    """The arguments of one call, and whether those of every other slot have the same shapes, strides and host-side numbers for certain."""

    args: tuple[Any, ...]
    fixed: bool


@dataclass(frozen=True)
class Inputs:
    """The source of a rank's inputs; ``secret`` seeds it."""

    problem: Problem
    case: Case
    rank: int
    secret: str
    device: torch.device

    def of(self, slot: int, block: int, kind: str = RANDOM, generators: BlockGenerators | None = None) -> Drawn:
        """The arguments of a slot's call in a block; with the ``generators`` of the block, its slots are drawn in order."""
        who = {"secret": self.secret, "case_key": self.case.key, "rank": self.rank}
        draw = Draw(**who, slot=slot, block=block, kind=kind, device=self.device, generators=generators)  # type: ignore[arg-type]
        return Drawn(self.problem.inputs(self.case, self.rank, draw), draw.fixed)


@dataclass(frozen=True)
class Layouts:
    """The layouts of a case's slots: the arguments of every rank, and this rank's outputs; the bytes that each takes on this rank.
    ``slot_bytes``: of the inputs or the outputs of a slot, on the rank that needs most. ``reference_s``: the longest that one call of the
    reference took, warm-up and waiting for peers included. ``quickest_s``: the shortest."""

    arguments: list[list[Description]]
    outputs: list[Description]
    input_bytes: int
    output_bytes: int
    slot_bytes: int
    reference_s: float
    quickest_s: float


def find_layouts(inputs: Inputs, slots: int, most_bytes: float, groups: Mapping[str, Any]) -> Layouts:
    """The layouts of ``slots`` slots, or of as many as take ``most_bytes`` for inputs and for outputs on the rank that needs most.

    All ranks ask for the same at the same time, and hold the arguments of one slot at a time. Shapes and strides of a slot are the same in
    every block: they are drawn from nothing that changes (see :mod:`peerlane.problems.contract.draw`). Inputs are drawn for every slot
    unless all are alike. A reference that can be captured knows nothing of contents when it shapes its outputs: it is run once for all
    slots whose arguments are alike on all ranks.
    """
    times: list[float] = []

    def tree(slot: int) -> Tree:
        return strip_overlap(inputs.of(slot, 0).args)

    def answer(args: Tree) -> Description:
        found, seconds = _answer(inputs, args, groups)
        times.append(seconds)
        return found

    drawn = inputs.of(0, 0)
    fixed, first = drawn.fixed, strip_overlap(drawn.args)
    mine, output = describe(first), answer(first)
    for _ in range(_USUAL_CALLS if inputs.device.type == "cuda" else 0):  # the first one connects and loads
        answer(first)
    del drawn, first
    everyone = _gather((mine, fixed, max(place_slots([item])[1] for item in (mine, output))))
    slot_bytes = max(size for _, _, size in everyone)
    slots = slots_that_fit(slots, slot_bytes, most_bytes)
    answers: dict[str | int, Description] = {}

    def described(slot: int) -> Description:
        args = tree(slot)
        if not inputs.problem.graph:
            answers[slot] = answer(args)
        return describe(args)

    if all(fixed for _, fixed, _ in everyone):
        arguments = [[item] * slots for item, _, _ in everyone]
    else:
        arguments = _gather([mine, *map(described, range(1, slots))])
    alike = [repr(of_all) if inputs.problem.graph else slot for slot, of_all in enumerate(zip(*arguments, strict=True))]
    answers[alike[0]] = output
    for slot, key in enumerate(alike):
        if key not in answers:
            answers[key] = answer(tree(slot))
    placed = [place_slots(items) for items in arguments]
    outputs, output_bytes = place_slots(answers[key] for key in alike)
    return Layouts([layout for layout, _ in placed], outputs, placed[inputs.rank][1], output_bytes, slot_bytes, max(times), min(times))


def slots_that_fit(slots: int, slot_bytes: int, most_bytes: float) -> int:
    """Returns how many of ``slots`` slots of this size to lay out: as many as take ``most_bytes``, but no fewer than a case needs."""
    fewest = FEWEST_SLOTS if FEWEST_SLOTS * slot_bytes <= MOST_OF_FEWEST_BYTES else FEWEST_LARGE_SLOTS
    return max(fewest, min(slots, int(most_bytes / slot_bytes)))


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _answer(inputs: Inputs, tree: Tree, groups: Mapping[str, Any]) -> tuple[Description, float]:
    """The output of the reference on these arguments, from memory that they are copied to as for every other call; the call's seconds."""
    layout, end = place_slots([describe(tree)])
    calls = ArgumentSlots(torch.empty(end, dtype=torch.uint8, device=inputs.device), layout, groups.__getitem__)
    calls.fill([tree])
    begin = time.monotonic()
    returned = inputs.problem.reference_of(inputs.case.variant)(*calls.args[0])
    if inputs.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    return describe_answer(inputs.problem.answer(returned, calls.args[0])), seconds
