"""Draws the inputs of one rank for the calls of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from peerlane.problems.contract.draw import RANDOM, BlockGenerators, Draw
from peerlane.problems.contract.spec import Case, Problem


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
