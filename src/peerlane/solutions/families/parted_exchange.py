"""An exchange of axes between two transforms, in parts, so that the exchange of one part runs beside the transforms of others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from peerlane.device import Group
from peerlane.device.collectives.strided import exchange_axes, exchange_part
from peerlane.device.host.side_stream import side_stream

PART_BYTES, MOST_PARTS = 32 << 20, 4
"""A part is at least this large behind the first transform: smaller ones leave the GPU idle between launches."""

Transform = Callable[[torch.Tensor], torch.Tensor]


def part_starts(slices: int, slice_bytes: int) -> tuple[list[int], int]:
    """Returns where parts begin, and how many slices each has. They cover all slices; the last two may overlap, so that all are alike."""
    parts = max(1, min(MOST_PARTS, slices, slices * slice_bytes // PART_BYTES))
    size = -(-slices // parts)
    return [min(part * size, slices - size) for part in range(parts)], size


def exchange_between(
    group: Group, x: torch.Tensor, first: Transform, second: Transform, *, joined: int, cut: int, nbytes: int
) -> torch.Tensor:
    """Collective: returns ``second(exchange_axes(first(x), joined, cut))``, contiguous.

    ``joined`` and ``cut`` are negative: they count from the last axis. Transforms get some slices of x at a time, with all axes before both
    in one, or one more of extent 1 if there is none. ``nbytes`` is the size of ``first(x)``. All ranks pass one shape."""
    lead = x.dim() + min(joined, cut)
    slices = x.flatten(0, lead - 1) if lead else x.unsqueeze(0)
    starts, size = part_starts(len(slices), nbytes // max(1, len(slices)))
    if len(starts) == 1:
        out = second(exchange_axes(group, first(slices), joined=joined, cut=cut)).contiguous()
    else:
        out = _in_parts(group, slices, starts, size, (first, second), (joined, cut))
    return out.view(*x.shape[:lead], *out.shape[1:])


def _in_parts(
    group: Group, x: torch.Tensor, starts: list[int], size: int, transforms: tuple[Transform, Transform], axes: tuple[int, int]
) -> torch.Tensor:
    (first, second), (joined, cut), side = transforms, (axis + x.dim() for axis in axes), side_stream(group, x.is_cuda)
    sent, arrived, out = [], [], None
    for part, start in enumerate(starts):
        sent.append(first(x[start : start + size]).contiguous())  # kept until this stream has waited for the other one, which reads it
        side.follow()
        with side():
            results = exchange_part(group, sent[-1], part, len(starts), joined=joined, cut=cut)
        arrived.append(side.behind())
    for part, start in enumerate(starts):
        arrived[part]()
        result = second(results[part])
        out = result.new_empty((len(x), *result.shape[1:])) if out is None else out
        out[start : start + size].copy_(result)
    assert out is not None
    return out
