"""A case as a trusted rank has it open: what is generated, what the candidate sees of it, and what was collected from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from peerlane.evaluate.memory.arena import Arena, view
from peerlane.evaluate.memory.guards import GuardBands
from peerlane.evaluate.memory.input_generation import InputGenerator
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, slot_range
from peerlane.evaluate.ranks.timed_block import Solution
from peerlane.problems.contract.spec import Case, Problem
from peerlane.problems.contract.tree import Description, tensor_descriptions


@dataclass(frozen=True)
class Snapshot:
    """What a candidate returned for one slot of one block, as its rank described it, the bytes in its region, and those of its inputs.

    ``source``: the slot that these were generated for."""

    slot: int
    source: int
    kind: str
    described: Description
    tensors: list[torch.Tensor]
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of memory that it holds."""
        return self.inputs.nbytes + sum(tensor.nbytes for tensor in self.tensors)


@dataclass
class OpenCase:
    """A case that is laid out in memory."""

    problem: Problem
    case: Case
    groups: dict[str, Any]
    staging: torch.Tensor
    private: ArgumentSlots
    input_generator: InputGenerator
    public: ArgumentSlots
    input_bytes: int
    output_layout: list[Description]
    output_bytes: int
    private_outputs: OutputRegions
    arena: Arena
    guards: GuardBands
    layouts: list[list[Description]]
    """of the arguments on every rank"""
    kinds: list[str] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    changes: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """of arguments that were to stay as they were: name, and whether they did not"""
    checksummed: tuple[int, list[torch.Tensor]] = (0, [])
    _spans: dict[int, list[slice]] = field(default_factory=dict)

    def spans(self, slot: int) -> list[slice]:
        """Where every rank has the inputs of a slot in its memory."""
        if slot not in self._spans:
            self._spans[slot] = [slot_range(layout[slot]) for layout in self.layouts]
        return self._spans[slot]

    @property
    def reference(self) -> Solution:
        """The reference of the case's variant."""
        return self.problem.reference_of(self.case.variant)

    @property
    def _answers(self) -> torch.Tensor:
        return self.arena.data[self.input_bytes : self.input_bytes + self.output_bytes]

    def taken(self, slot: int) -> list[torch.Tensor]:
        """Copies of what the arena has of a slot's outputs."""
        return [view(self._answers, placed).clone() for placed in tensor_descriptions(self.output_layout[slot])]
