"""Where the slots of a case lie in memory: found once for each slot, however often the case is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate.slots import ArgumentSlots, contiguous_layout, end_of, place_slots, strip_overlap
from peerlane.problems._spec import Case, Problem
from peerlane.problems._tree import Description, describe

DrawSlots = Callable[[Iterable[int]], list[tuple[Any, ...]]]
"""This rank's inputs of some slots."""


@dataclass
class Layouts:
    """Of the first slots: the arguments of every rank, and this rank's outputs. They lie there however many slots follow."""

    arguments: list[list[Description]]
    outputs: list[Description] = field(default_factory=list)

    def of_first(self, slots: int) -> Layouts:
        """The same for so many slots."""
        return Layouts([mine[:slots] for mine in self.arguments], self.outputs[:slots])


class KnownLayouts:
    """What one rank knows of a problem's cases. A slot's shapes and strides are the same in every block, for they are drawn from nothing
    that changes (see :mod:`peerlane.problems._draw`)."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._problem = 0
        self._cases: dict[str, Layouts] = {}

    def of(self, problem: Problem, case: Case, slots: int, draw: DrawSlots, groups: Mapping[str, Any]) -> Layouts:
        """The layouts of a case's first slots; all ranks ask for the same at the same time.

        Those of slots that nobody has asked for yet are found, sizes from one drawing of the inputs and output shapes from one run of the
        reference, and remembered until another problem's are asked for.
        """
        if self._problem != problem.id:
            self._problem, self._cases = problem.id, {}
        known = self._cases.setdefault(case.key, Layouts([[] for _ in range(self._world_size)]))
        if len(known.outputs) < slots:
            self._find(known, problem, case, slots, draw, groups)
        return known.of_first(slots)

    def _find(self, known: Layouts, problem: Problem, case: Case, slots: int, draw: DrawSlots, groups: Mapping[str, Any]) -> None:
        first, mine = len(known.outputs), list(known.arguments[self._rank])
        trees = [strip_overlap(tree) for tree in draw(range(first, slots))]
        placed, end = place_slots(map(describe, trees), end_of(mine))
        mine += placed
        memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        calls = ArgumentSlots(memory, mine, groups.__getitem__)
        calls.fill(trees, first)
        del trees
        reference = problem.reference_of(case.variant)
        answers = (problem.answer(reference(*args), args) for args in calls.args[first:])
        outputs, _ = contiguous_layout(answers, end_of(known.outputs))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        everyone: list[list[Description]] = [[] for _ in known.arguments]
        dist.all_gather_object(everyone, placed)
        for arguments, further in zip(known.arguments, everyone, strict=True):
            arguments += further
        known.outputs += outputs
