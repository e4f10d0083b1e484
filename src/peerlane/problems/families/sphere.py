"""What the convolution on the sphere knows of geometry: how axes are split, which points a disk holds, what must cross between ranks."""

import functools
import math

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.matmul import FP64


def shares(size: int, count: int) -> list[int]:
    """How many of ``size`` items each of ``count`` ranks holds: ceil(size / count) but for the last; floor, if that left it none."""
    each = -(-size // count)
    if each * (count - 1) >= size:
        each = size // count
    return [each] * (count - 1) + [size - each * (count - 1)]


def span(size: int, count: int, place: int) -> range:
    """What of ``size`` items the rank at ``place`` holds."""
    each = shares(size, count)
    return range(sum(each[:place]), sum(each[: place + 1]))


def grid_of(case: pc.Case) -> tuple[int, int]:
    """Ranks along longitude and along latitude. ``case["azimuth"]``: the former, or ``"world"``."""
    azimuths = case.world_size if case["azimuth"] == "world" else case["azimuth"]
    return azimuths, case.world_size // azimuths


def place_of(case: pc.Case, rank: int) -> tuple[int, int]:
    """The rank's place along longitude and along latitude; neighbouring ranks share a band of latitudes."""
    return rank % grid_of(case)[0], rank // grid_of(case)[0]


@functools.lru_cache(maxsize=64)
def reach(nlat_out: int, nlat_in: int, nlon_in: int, cutoff: float) -> torch.Tensor:
    """How many longitudes to either side a disk around a point of output row h covers in input row i, (H, I); -1: none.

    Rows are equally spaced from pole to pole; ``cutoff`` is the disk's radius in input rows.
    """
    out, source = (torch.linspace(0, math.pi, rows, dtype=FP64) for rows in (nlat_out, nlat_in))
    out = out.unsqueeze(1)
    radius = cutoff * math.pi / (nlat_in - 1)
    height, width = out.cos() * source.cos(), (out.sin() * source.sin()).clamp(min=1e-12)
    angle = ((math.cos(radius) - height) / width).clamp(-1, 1).acos()  # spherical law of cosines
    steps = (angle * nlon_in / (2 * math.pi)).floor().to(torch.int64).clamp(max=nlon_in // 2)
    return torch.where((out - source).abs() <= radius, steps, -1)


@functools.lru_cache(maxsize=64)
def disks(
    nlat_out: int, nlat_in: int, nlon_in: int, cutoff: float, first: int, last: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The taps of all disks in input rows first to last: output row, input row, longitude relative to the centre, and taps of the disk."""
    widths = reach(nlat_out, nlat_in, nlon_in, cutoff)
    counts = (2 * widths + 1).clamp(0, nlon_in)
    in_disk, counts, widths = counts.sum(1), counts[:, first:last].flatten(), widths[:, first:last].flatten()
    ring = torch.arange(counts.numel()).repeat_interleave(counts)
    place = torch.arange(ring.numel()) - (counts.cumsum(0) - counts)[ring]
    rows = last - first
    found = (ring // rows, ring % rows, place - widths[ring], in_disk[ring // rows])
    return tuple(tensor.to(device) for tensor in found)  # type: ignore[return-value]


def _matched(reached: torch.Tensor) -> int:
    """The size of a matching between rows and columns that are related; columns are taken by the rows with the least choice first."""
    reached = reached[reached.any(1)]
    taken: set[int] = set()
    for choice in sorted((row.nonzero().flatten().tolist() for row in reached), key=len):
        taken.update([column for column in choice if column not in taken][:1])
    return len(taken)


@functools.lru_cache(maxsize=256)
def crossing_points(
    support: str, sizes: tuple[int, int, int, int], cutoff: float, shape: tuple[int, int], place: tuple[int, int]
) -> tuple[int, int]:
    """Points of the rank's output that depend on as many points elsewhere, one to one, and points elsewhere on its own.

    In general position the linear map between them has that rank (per channel), so no fewer numbers can pass the port. Counted for a
    cut along latitude and for one along longitude; the larger holds. No claim is made for random filters.
    """
    nlat_in, nlon_in, nlat_out, nlon_out = sizes
    (azimuths, polars), (azimuth, polar) = shape, place
    rows, band = span(nlat_out, polars, polar), span(nlat_in, polars, polar)
    columns, arc = span(nlon_out, azimuths, azimuth), span(nlon_in, azimuths, azimuth)
    step = nlon_in // nlon_out
    if support == "public":
        if polars > 1:
            return len(rows) * len(columns), len(band) * len(arc)
        crossing = sum((q * step + h) % nlon_in not in arc for h in rows for q in columns)
        return (max(crossing - len(rows), 0),) * 2  # turned by a longitude, a row may have one such point less
    if support == "random":
        return 0, 0
    widths = reach(nlat_out, nlat_in, nlon_in, cutoff)
    mine, here = torch.zeros(nlat_out, dtype=torch.bool), torch.zeros(nlat_in, dtype=torch.bool)
    mine[rows.start : rows.stop], here[band.start : band.stop] = True, True
    inward = _matched(widths[mine][:, ~here] >= 0) * len(columns)
    outward = _matched(widths[~mine][:, here] >= 0) * len(columns)
    sideways = 0
    if azimuths > 1:
        limit = min(len(columns), nlon_in - len(arc))
        widest, nearest = widths[mine][:, here].max(1)
        paired = dict(zip(nearest.tolist(), widest.tolist(), strict=True))  # every input row serves one output row at most
        sideways = sum(min(2 * max(width, 0) // step, limit) for width in paired.values())
    return max(inward, sideways), max(outward, sideways)


def mixed(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int) -> torch.Tensor:
    """y (q, K, h, B, C) to (B, C_out, h, q)."""
    wide = y.reshape(*y.shape[:4], groups, y.shape[4] // groups)
    output = torch.einsum("qkhbgc,gock->bgohq", wide, weight.view(groups, -1, *weight.shape[1:])).flatten(1, 2)
    return (output if bias is None else output + bias.view(-1, 1, 1)).contiguous()
