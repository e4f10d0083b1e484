"""A case as a trusted rank has it open: what is generated, what the candidate sees of it, and what was collected from there."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.evaluate.memory.arena import Arena, view
from peerlane.evaluate.memory.guards import GuardBands, argument_regions, output_regions
from peerlane.evaluate.memory.layouts import Inputs, Layouts
from peerlane.evaluate.memory.slots import ArgumentSlots, OutputRegions, place_in_one, slot_range, updates_of
from peerlane.problems.contract.draw import BlockGenerators, Draw
from peerlane.problems.contract.tree import Description, tensor_descriptions

_CACHED_BYTES = 64 << 20
"""More than the L2 cache of any GPU holds."""


@dataclass
class Snapshot:
    """An answer of a candidate for one slot of one block: its rank's description, the bytes in its region, and those of its inputs.

    ``source``: the slot that these were generated for. ``inputs`` may be a part of the case's private memory until others are generated
    there."""

    slot: int
    source: int
    kind: str
    described: Description
    tensors: list[torch.Tensor]
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + sum(tensor.nbytes for tensor in self.tensors)


class OpenCase:
    """A case that is laid out in memory. Its contents are whatever was there, until :meth:`generate`."""

    def __init__(self, inputs: Inputs, layouts: Layouts, groups: dict[str, Any], memory_fd: int) -> None:
        self.inputs, self.problem, self.case, self.groups = inputs, inputs.problem, inputs.case, groups
        self.layouts, self.output_layout = layouts.arguments, layouts.outputs
        layout, device = self.layouts[inputs.rank], inputs.device
        self.input_bytes, self.output_bytes, self.slot_bytes = layouts.input_bytes, layouts.output_bytes, layouts.slot_bytes
        self.arena = Arena.create(self.input_bytes + self.output_bytes, device, memory_fd)
        self.arena.clear()
        self.staging = torch.empty(self.input_bytes, dtype=torch.uint8, device=device)
        self.private = ArgumentSlots(self.staging, layout, groups.__getitem__)
        self.public = ArgumentSlots(self.arena.data[: self.input_bytes], layout, groups.__getitem__)
        regions = [*argument_regions(layout, self.problem.parameters), *output_regions(self.output_layout, self.input_bytes)]
        bands = Draw(secret=f"{inputs.secret} guard bands", case_key=self.case.key, slot=0, block=0, rank=inputs.rank, device=device)
        self.guards = GuardBands(self.arena.data, regions, bands)
        self.reference = self.problem.reference_of(self.case.variant)
        self.kinds: Sequence[str] = ()
        """The kinds of the inputs that were generated last, for the first slots."""
        self.snapshots: list[Snapshot] = []
        self.changes: list[tuple[str, torch.Tensor]] = []
        """Arguments that must not change: name, and whether they have changed."""
        self.saved: tuple[int, list[torch.Tensor]] = (0, [])
        """a slot, and copies of its outputs, to be compared with what lies there later"""
        self._generators = BlockGenerators(device)

    def generate(self, block: int, kinds: Sequence[str]) -> None:
        """New contents for the first ``len(kinds)`` slots, in stream order; ``kinds`` says which of them are integer draws."""
        self._keep_inputs()
        self.kinds, inputs = kinds, self.inputs
        self._generators.begin(secret=inputs.secret, case_key=self.case.key, block=block, rank=inputs.rank)
        self.private.fill(inputs.of(slot, block, kind, self._generators).args for slot, kind in enumerate(kinds))

    @functools.cached_property
    def private_outputs(self) -> OutputRegions:
        """The places that timed blocks of the reference copy their answers to, which nobody reads.

        They are as many as the candidate's, so that copies take as long. Outputs that no cache holds share one place.
        """
        largest = max((slot_range(layout).stop - slot_range(layout).start for layout in self.output_layout), default=0)
        layout, size = place_in_one(self.output_layout) if largest > _CACHED_BYTES else (self.output_layout, self.output_bytes)
        own = torch.empty(size, dtype=torch.uint8, device=self.inputs.device)
        return OutputRegions(own, layout, self.inputs.device, updates_of(self.problem))

    def collect(self, slot: int, source: int, described: Description) -> None:
        """Takes a snapshot of a slot, whose inputs were generated for the slot ``source``."""
        inputs = self.staging[self.spans(source)[self.inputs.rank]]
        if self.problem.changeable:  # which the reference changes there
            inputs = inputs.clone()
        self.snapshots.append(Snapshot(slot, source, self.kinds[source], described, self.taken(slot), inputs))

    def _keep_inputs(self) -> None:
        """Copies the inputs of snapshots that have not been judged before others take their place. Large ones are judged at once."""
        for snapshot in self.snapshots:
            if snapshot.inputs.untyped_storage().data_ptr() == self.staging.untyped_storage().data_ptr():
                snapshot.inputs = snapshot.inputs.clone()

    def spans(self, slot: int) -> list[slice]:
        """Returns the range of a slot's inputs in the memory of every rank."""
        return [slot_range(layout[slot]) for layout in self.layouts]

    @property
    def outputs(self) -> torch.Tensor:
        """The bytes of the candidate's snapshots."""
        return self.arena.data[self.input_bytes : self.input_bytes + self.output_bytes]

    def taken(self, slot: int) -> list[torch.Tensor]:
        """Copies of what the arena has of a slot's outputs."""
        return [view(self.outputs, placed).clone() for placed in tensor_descriptions(self.output_layout[slot])]
