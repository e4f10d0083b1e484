"""New contents for the slots of a case, block after block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.evaluate.memory.slots import ArgumentSlots
from peerlane.problems.contract.draw import RANDOM, BlockGenerators, Draw
from peerlane.problems.contract.spec import Case, Problem


@dataclass(frozen=True)
class Drawn:
    """The arguments of one call, and whether those of every other slot have the same shapes, strides and host-side numbers for certain."""

    args: tuple[Any, ...]
    fixed: bool


@dataclass(frozen=True)
class Inputs:
    """What one rank draws for the calls of a case; ``secret`` seeds it."""

    problem: Problem
    case: Case
    rank: int
    secret: str
    device: torch.device

    def of(self, slot: int, block: int, kind: str = RANDOM, generators: BlockGenerators | None = None) -> Drawn:
        """The arguments of a slot's call in a block."""
        draw = Draw(
            secret=self.secret,
            case_key=self.case.key,
            slot=slot,
            block=block,
            rank=self.rank,
            kind=kind,
            device=self.device,
            generators=generators,
        )
        return Drawn(self.problem.inputs(self.case, self.rank, draw), draw.fixed)


class InputGenerator:
    """Draws the contents of slots, one behind the other, from generators that begin anew with every block."""

    def __init__(self, inputs: Inputs, slots: ArgumentSlots) -> None:
        self._inputs, self._slots = inputs, slots
        self._generators = BlockGenerators(inputs.device)

    def generate_inputs(self, block: int, kinds: Sequence[str]) -> None:
        """New contents for the first ``len(kinds)`` slots, in stream order; ``kinds`` says which of them are integer draws."""
        inputs = self._inputs
        self._generators.begin(secret=inputs.secret, case_key=inputs.case.key, block=block, rank=inputs.rank)
        self._slots.fill(inputs.of(slot, block, kind, self._generators).args for slot, kind in enumerate(kinds))
