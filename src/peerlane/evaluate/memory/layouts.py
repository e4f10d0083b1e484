"""Where the slots of a case lie in memory: found once for each slot, however often the case is opened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate.memory.input_generation import Drawn
from peerlane.evaluate.memory.slots import ArgumentSlots, describe_answer, end_of, place_slots, strip_overlap
from peerlane.problems.contract.spec import Case, Problem
from peerlane.problems.contract.tree import Description, describe

DrawSlots = Callable[[Iterable[int]], list[Drawn]]
"""This rank's inputs of some slots."""
_Key = tuple[int | str | None, ...]
"""The arguments of all ranks, as they are written, and the slot, where its contents may shape its outputs."""


@dataclass
class Layouts:
    """Of the first slots: the arguments of every rank, and this rank's outputs. They lie there however many slots follow."""

    arguments: list[list[Description]]
    outputs: list[Description] = field(default_factory=list)
    reference_s: float = field(default=0.0, compare=False)
    """the longest that one call of the reference took, which found the outputs; warm-up and waiting for peers included"""

    def of_first(self, slots: int) -> Layouts:
        """The same for so many slots."""
        return Layouts([mine[:slots] for mine in self.arguments], self.outputs[:slots], self.reference_s)


@dataclass
class _Known:
    """What one rank knows of a case."""

    layouts: Layouts
    fixed: Description | None = None
    """this rank's arguments in every slot, where all are alike"""
    answers: dict[_Key, Description] = field(default_factory=dict)
    """this rank's outputs"""


class KnownLayouts:
    """What one rank knows of a problem's cases. A slot's shapes and strides are the same in every block, for they are drawn from nothing
    that changes (see :mod:`peerlane.problems.contract.draw`)."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._problem = 0
        self._cases: dict[str, _Known] = {}

    def of(self, problem: Problem, case: Case, slots: int, draw: DrawSlots, groups: Mapping[str, Any]) -> Layouts:
        """The layouts of a case's first slots; all ranks ask for the same at the same time.

        Those of slots that nobody has asked for yet are found, and remembered until another problem's are asked for: sizes by drawing
        inputs, unless those of all slots are alike, and output shapes by running the reference. A reference that can be captured knows
        nothing of contents when it shapes its outputs: it is run once for all slots whose arguments are alike on all ranks.
        """
        if self._problem != problem.id:
            self._problem, self._cases = problem.id, {}
        known = self._cases.setdefault(case.key, _Known(Layouts([[] for _ in range(self._world_size)])))
        if len(known.layouts.outputs) < slots:
            self._find(known, problem, case, slots, draw, groups)
        return known.layouts.of_first(slots)

    def _find(self, known: _Known, problem: Problem, case: Case, slots: int, draw: DrawSlots, groups: Mapping[str, Any]) -> None:
        layouts, trees = known.layouts, dict[int, Any]()
        fresh = range(len(layouts.outputs), slots)

        def have(wanted: Iterable[int]) -> None:
            if missing := [slot for slot in wanted if slot not in trees]:
                for slot, drawn in zip(missing, draw(missing), strict=True):
                    trees[slot] = strip_overlap(drawn.args)
                    if drawn.fixed:
                        known.fixed = describe(trees[slot])

        if known.fixed is None:
            have(fresh[:1])
        if known.fixed is None:
            have(fresh)
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, known.fixed or [describe(trees[slot]) for slot in fresh])
        everyone = [[item] * len(fresh) if isinstance(item, dict) else item for item in gathered]
        written = [[repr(item)] * len(fresh) if isinstance(item, dict) else list(map(repr, item)) for item in gathered]
        keys = [(None if problem.graph else slot, *of_all) for slot, of_all in zip(fresh, zip(*written, strict=True), strict=True)]
        called: dict[_Key, int] = {}
        for key, slot in zip(keys, fresh, strict=True):
            if key not in known.answers:
                called.setdefault(key, slot)
        have(called.values())
        for key, slot in called.items():
            begin = time.monotonic()
            known.answers[key] = self._answer(problem, case, trees.pop(slot), groups)
            layouts.reference_s = max(layouts.reference_s, time.monotonic() - begin)
        for mine, further in zip(layouts.arguments, everyone, strict=True):
            mine += place_slots(further, end_of(mine))[0]
        layouts.outputs += place_slots((known.answers[key] for key in keys), end_of(layouts.outputs))[0]

    def _answer(self, problem: Problem, case: Case, tree: Any, groups: Mapping[str, Any]) -> Description:
        """The output of the reference on these arguments, from memory that they are copied to as for every other call."""
        layout, end = place_slots([describe(tree)])
        calls = ArgumentSlots(torch.empty(end, dtype=torch.uint8, device=self._device), layout, groups.__getitem__)
        calls.fill([tree])
        args = calls.args[0]
        returned = problem.reference_of(case.variant)(*args)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return describe_answer(problem.answer(returned, args))
