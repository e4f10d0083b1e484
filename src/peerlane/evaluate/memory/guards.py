"""Guard bands: random bytes around every tensor of an arena. A kernel that writes beyond its argument changes them."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from peerlane.evaluate.memory.arena import extent
from peerlane.problems.contract.draw import Draw
from peerlane.problems.contract.tree import Description, tensor_descriptions

_LONGEST_BYTES = 4096  # of one band: the last one would else reach to the end of the arena's pages


@dataclass(frozen=True)
class Region:
    """The bytes of one tensor in an arena, and whose they are."""

    begin: int
    end: int
    slot: int
    name: str


def argument_regions(layout: Sequence[Description], parameters: Sequence[str]) -> Iterator[Region]:
    """The tensors of all slots' arguments, by the parameter that they belong to."""
    for slot, description in enumerate(layout):
        for name, item in zip(parameters, description["items"], strict=False):
            yield from (Region(*extent(placed), slot, f"argument {name}") for placed in tensor_descriptions(item))


def output_regions(layout: Sequence[Description], base: int) -> Iterator[Region]:
    """The places of all slots' snapshots, which begin at ``base``."""
    for slot, description in enumerate(layout):
        for placed in tensor_descriptions(description):
            begin, end = extent(placed)
            yield Region(base + begin, base + end, slot, "the snapshot of an output")


class GuardBands:
    """The bytes of ``data`` that belong to none of ``regions``, which are in ascending order; at most 4 KiB behind each of them."""

    def __init__(self, data: torch.Tensor, regions: Sequence[Region], draw: Draw) -> None:
        self._data, self._regions = data, regions
        begins = torch.tensor([0, *(region.end for region in regions)])
        ends = torch.tensor([*(region.begin for region in regions), data.numel()])
        lengths = (ends - begins).clamp(max=_LONGEST_BYTES)
        total, before = int(lengths.sum()), lengths.cumsum(0) - lengths
        shifts, lengths = (begins - before).to(data.device), lengths.to(data.device)
        self._places = torch.arange(total, device=data.device) + shifts.repeat_interleave(lengths, output_size=total)
        self._pattern = draw.bits(self._places.shape, torch.uint8).to(data.device)

    def paint(self) -> None:
        self._data[self._places] = self._pattern

    def out_of_bounds(self) -> tuple[Region, int] | None:
        """The region next to the first byte that was overwritten, and that byte's distance from its end (negative: from its begin)."""
        changed = (self._data[self._places] != self._pattern).nonzero()
        if not changed.numel() or not self._regions:
            return None
        place = int(self._places[int(changed[0])])
        behind = bisect.bisect_right(self._regions, place, key=lambda region: region.end) - 1
        if behind < 0:
            return self._regions[0], place - self._regions[0].begin
        return self._regions[behind], place - self._regions[behind].end
