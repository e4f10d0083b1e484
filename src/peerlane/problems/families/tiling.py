"""How a volume is cut into overlapping tiles that are processed apart, and how these are blended and put together again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from peerlane.problems.families.matmul import FP32, FP64

Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Tiling:
    """How a latent volume is cut into tiles, who decodes them, and how they are blended. Triples are (time, height, width).

    Attributes:
        size: of the latent volume.
        tile: the largest extent of a tile.
        stride: between the first latents of neighbouring tiles.
        upsample: pixels per latent.
        blend: pixels over which a tile fades in, where it has a neighbour before it.
        keep: pixels of a tile that remain.
    """

    size: Tile
    tile: Tile
    stride: Tile
    upsample: Tile
    blend: Tile
    keep: Tile

    @staticmethod
    def of(
        size: Sequence[int], tile: Tile, spatial_overlap: float, temporal_overlap: float, upsample: Tile, first_frame_as_image: bool
    ) -> Tiling:
        """From the arguments of a call; raises ValueError if a stride is not positive."""
        tile = (tile[0] + int(first_frame_as_image), *tile[1:])
        overlaps = (temporal_overlap, spatial_overlap, spatial_overlap)
        strides = [int(extent * (1 - overlap)) for extent, overlap in zip(tile, overlaps, strict=True)]
        if min(strides) < 1:
            raise ValueError(f"got tiles of {tile} with overlaps {overlaps}, that is strides of {strides}: expected positive strides")
        pixels = [extent * factor for extent, factor in zip(tile, upsample, strict=True)]
        blend = [int(extent * overlap) for extent, overlap in zip(pixels, overlaps, strict=True)]
        keep = [extent - fade for extent, fade in zip(pixels, blend, strict=True)]
        return Tiling(_triple(size), tile, _triple(strides), upsample, _triple(blend), _triple(keep))

    @property
    def counts(self) -> Tile:
        """Tiles along every axis."""
        return _triple([-(-size // stride) for size, stride in zip(self.size, self.stride, strict=True)])

    @property
    def tiles(self) -> list[Tile]:
        """All tiles by their place in the grid, the width running fastest."""
        length, height, width = self.counts
        return list(itertools.product(range(length), range(height), range(width)))

    def latents(self, tile: Tile) -> tuple[slice, ...]:
        """The part of the latent volume that a tile covers."""
        ranges = zip(tile, self.stride, self.tile, self.size, strict=True)
        return tuple(slice(place * stride, min(place * stride + extent, size)) for place, stride, extent, size in ranges)

    def pixels(self, tile: Tile) -> Tile:
        """The extent of a decoded tile."""
        return _triple([(part.stop - part.start) * factor for part, factor in zip(self.latents(tile), self.upsample, strict=True)])

    def kept(self, tile: Tile) -> tuple[slice, ...]:
        """Where what remains of a tile, its first pixels, lies in the assembled volume."""
        return tuple(self._kept(axis, place) for axis, place in enumerate(tile))

    def _kept(self, axis: int, place: int) -> slice:
        extents = [min(self.pixels(_triple([at if i == axis else 0 for i in range(3)]))[axis], self.keep[axis]) for at in range(place + 1)]
        return slice(sum(extents[:-1]), sum(extents))

    def owners(self, ranks: int) -> dict[Tile, int]:
        """Who decodes each tile, in the order in which tiles are dealt out: the largest first, ties by place."""

        def latent_count(tile: Tile) -> int:
            return torch.Size(part.stop - part.start for part in self.latents(tile)).numel()

        order = sorted(self.tiles, key=latent_count, reverse=True)
        return {tile: place % ranks for place, tile in enumerate(order)}

    @functools.cache  # noqa: B019 (there are few tilings, and every rank asks for the same)
    def decoded_latents(self, ranks: int) -> tuple[int, ...]:
        """How many latents each rank decodes, those in the overlap of two of its tiles counted once."""
        covered = torch.zeros((ranks, *self.size), dtype=torch.bool)
        for tile, owner in self.owners(ranks).items():
            covered[owner][self.latents(tile)] = True
        return tuple(covered.flatten(1).sum(1).tolist())

    def output(self) -> Tile:
        """The extent of the assembled volume."""
        return _triple([self._kept(axis, count - 1).stop for axis, count in enumerate(self.counts)])

    def assembled(self, decoded: Mapping[Tile, torch.Tensor], fade: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The volume (B, C, *output) from decoded tiles (B, C, *pixels).

        ``fade(before, after, weight)`` blends the last pixels of a neighbour, as it was decoded, into a tile's first; weight runs from 0 to
        below 1 along the axis.
        """
        first = decoded[0, 0, 0]
        volume = first.new_empty((*first.shape[:2], *self.output()))
        for tile, own in decoded.items():
            blended = own
            for axis in range(3):
                if tile[axis]:
                    before = decoded[_triple([place - (i == axis) for i, place in enumerate(tile)])]
                    blended = self._blended(before, blended, axis, fade)
            target = self.kept(tile)
            cut(volume, target).copy_(cut(blended, [slice(part.stop - part.start) for part in target]))
        return volume

    def _blended(self, before: torch.Tensor, own: torch.Tensor, axis: int, fade: Callable[..., torch.Tensor]) -> torch.Tensor:
        dim = axis + 2
        extent = min(before.shape[dim], own.shape[dim], self.blend[axis])
        if extent == 0:
            return own
        weight = torch.arange(extent, device=own.device, dtype=FP64).div_(extent).view(-1, *[1] * (2 - axis))
        faded = fade(before.narrow(dim, before.shape[dim] - extent, extent), own.narrow(dim, 0, extent), weight)
        return torch.cat([faded, own.narrow(dim, extent, own.shape[dim] - extent)], dim)


def _triple(values: Sequence[int]) -> Tile:
    first, second, third = values
    return (first, second, third)


def cut(volume: torch.Tensor, part: Sequence[slice]) -> torch.Tensor:
    """A view of a part of (B, C, time, height, width)."""
    return volume[(slice(None), slice(None), *part)]


def fade_rounding(before: torch.Tensor, after: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """before (1 - weight) + after weight, with both products and their sum rounded to the tensors' dtype."""
    return (before * (1 - weight).to(FP32)).to(before.dtype) + (after * weight.to(FP32)).to(after.dtype)


def fade_exactly(before: torch.Tensor, after: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """before (1 - weight) + after weight in the tensors' dtype, which should be wide."""
    weight = weight.to(before.dtype)
    return before * (1 - weight) + after * weight
