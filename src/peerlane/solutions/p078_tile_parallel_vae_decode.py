"""Problem 78, tiles of a video decoded and blended: one launch exchanges latents, which are small, and writes every pixel once.

A rank sends what its tiles cover, and decodes all pixels itself. A thread takes a cell: the pixels of a frame around one latent, which mix
nine latents of a tile and those of the tiles that fade out there. It interpolates along time as it loads, along the height once a row, and
along the width by one multiplication a pixel. Bound by HBM, which takes the pixels. A graph can capture it."""

import itertools
import math

import torch
import torch.distributed as dist

from peerlane.device import (
    U32,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    array,
    element_type,
    group_of,
    per_group,
)
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

namespace peerlane {
// Some pixels in a row along an axis, all nearest to one latent of their tile, and to one of the tile that fades out: the latents before,
// at and behind them; where the first pixel lies, in latents from the nearest; the own tile's weight there, and how it grows.
struct alignas(16) Cell {
    u16 own[3], tile, faded[3], fades;
    float place, faded_place, weight, growth;
};
}  // namespace peerlane

__device__ float mix(float first, float second, float weight) { return first + weight * (second - first); }
// At `place` from the second of three latents.
__device__ float between(const float (&latent)[3], float place) {
    return latent[1] + place * (place < 0 ? latent[1] - latent[0] : latent[2] - latent[1]);
}
// Where pixel i of a cell lies. The compiler knows it where a cell has all pixels around a latent.
template <u32 pixels>
__device__ float place_of(float first, u32 i) {
    return pixels == FACTOR ? (i + 0.5f) / FACTOR - 0.5f : first + i * (1.0f / FACTOR);
}

extern "C" __global__ void __launch_bounds__(768)
    decode_tiles(const __grid_constant__ Arena arena, const __grid_constant__ DecodeTiles args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const auto [length, height, width] = args.size;
    const u32 bytes = length * height * width * (4 / ELEMENT::lanes);  // of a channel
    const auto own_plane = [&](u32 plane) { return args.z + u64(plane / PLANES * args.channels + plane % PLANES) * bytes; };
    // Two buffers by parity: a rank that has begun the launch after next has heard of this one's end everywhere.
    const auto plane_of = [&](u32 rank, u32 plane) {
        return args.latents + (((epoch & 1) * WORLD_SIZE + rank) * args.images * PLANES + plane) * u64(bytes);
    };
    if (blockIdx.x < PUSHING) {
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < args.images * PLANES * args.units; i += PUSHING * blockDim.x) {
            const u32 plane = i / args.units, at = args.covered[i % args.units];
            const UNIT value = reinterpret_cast<const UNIT*>(own_plane(plane))[at];
            for (int k = 1; k < WORLD_SIZE; ++k) {
                char* const to = arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), plane_of(arena.rank, plane));
                reinterpret_cast<UNIT*>(to)[at] = value;
            }
        }
        peers.signal_all(blockIdx.x, epoch);
    }
    peers.wait_all_slots(0, PUSHING, epoch);

    constexpr u32 across = (COLUMNS + LANES - 1) / LANES, down = warp_threads / LANES;  // a warp's cells
    const u32 rows = args.images * 3 * FRAMES * LINES, lane = Warp{}.thread();
    each_row((rows + down - 1) / down * across, [&](u32 item) {
        const u32 row = item / across * down + lane / LANES, column = item % across * LANES + lane % LANES;
        if (row >= rows || column >= COLUMNS) return;
        const u32 frame = row / LINES, picture = frame / FRAMES, plane = picture / 3 * PLANES + picture % 3 % PLANES;
        const Cell t = args.places[frame % FRAMES], y = args.places[FRAMES + row % LINES], x = args.places[FRAMES + LINES + column];
        // Latents around the cell, of a tile, interpolated along time.
        const auto load = [&](u32 tile_t, u32 tile_y, u32 tile_x, const u16 (&ts)[3], float place, const u16 (&ys)[3], const u16 (&xs)[3],
                              float (&latents)[3][3]) {
            const u32 owner = args.owners[(tile_t * args.tiles[1] + tile_y) * args.tiles[2] + tile_x];
            const char* const from = owner == arena.rank ? own_plane(plane) : arena.local(plane_of(owner, plane));
            const u32 first = (place < 0 ? ts[0] : ts[1]) * height, second = (place < 0 ? ts[1] : ts[2]) * height;
#pragma unroll
            for (u32 i = 0; i < 3; ++i) {
#pragma unroll
                for (u32 j = 0; j < 3; ++j) {
                    const auto at = [&](u32 time) { return element_of<ELEMENT>(from, (time + ys[i]) * width + xs[j]); };
                    latents[i][j] = mix(at(first), at(second), place < 0 ? 1 + place : place);
                }
            }
        };
        float own[3][3], above[3][3], left[3][3];
        load(t.tile, y.tile, x.tile, t.own, t.place, y.own, x.own, own);
        if (t.fades) {
            load(t.tile - 1, y.tile, x.tile, t.faded, t.faded_place, y.own, x.own, left);
#pragma unroll
            for (u32 i = 0; i < 9; ++i) own[i / 3][i % 3] = mix(left[i / 3][i % 3], own[i / 3][i % 3], t.weight);
        }
        if (y.fades) load(t.tile, y.tile - 1, x.tile, t.own, t.place, y.faded, x.own, above);
        if (x.fades) load(t.tile, y.tile, x.tile - 1, t.own, t.place, y.own, x.faded, left);
        // Of a tile, three values of a row of pixels.
        const auto line_of = [](const float (&latents)[3][3], float place, float (&line)[3]) {
#pragma unroll
            for (u32 j = 0; j < 3; ++j) {
                const float down[3] = {latents[0][j], latents[1][j], latents[2][j]};
                line[j] = between(down, place);
            }
        };
#pragma unroll
        for (u32 i = 0; i < CELL_LINES; ++i) {
            const float place = place_of<CELL_LINES>(y.place, i);
            float line[3], other[3], value[CELL_COLUMNS];
            line_of(own, place, line);
            if (y.fades) {
                line_of(above, place_of<CELL_LINES>(y.faded_place, i), other);
#pragma unroll
                for (u32 j = 0; j < 3; ++j) line[j] = mix(other[j], line[j], y.weight + i * y.growth);
            }
#pragma unroll
            for (u32 j = 0; j < CELL_COLUMNS; ++j) value[j] = between(line, place_of<CELL_COLUMNS>(x.place, j));
            if (x.fades) {
                line_of(left, place, other);
#pragma unroll
                for (u32 j = 0; j < CELL_COLUMNS; ++j) {
                    const float faded = between(other, place_of<CELL_COLUMNS>(x.faded_place, j));
                    value[j] = mix(faded, value[j], x.weight + j * x.growth);
                }
            }
            const u64 at = (u64(row) * CELL_LINES + i) * COLUMNS + column;
            if constexpr (CELL_COLUMNS % row_lanes == 0) {
#pragma unroll
                for (u32 j = 0; j < CELL_COLUMNS; j += row_lanes) {
                    Vec16 whole;
#pragma unroll
                    for (u32 w = 0; w < 4; ++w) whole.word[w] = BFloat16::narrow(value + j + 2 * w);
                    reinterpret_cast<Vec16*>(args.video)[(at * CELL_COLUMNS + j) / row_lanes] = whole;
                }
            } else {
#pragma unroll
                for (u32 j = 0; j < CELL_COLUMNS; ++j) set_element<BFloat16>(args.video, at * CELL_COLUMNS + j, value[j]);
            }
        }
    });
}
"""
DECODE_TILES = DeclaredKernel(
    "decode_tiles", SOURCE, epochs=Epochs(), flags=Flags(), latents=Buffer(), z=Pointer("const char*"), video=Pointer(),
    places=Pointer("const struct Cell*"), owners=Pointer("const u32*"), covered=Pointer("const u32*"), units=U32, images=U32, channels=U32,
    size=array(U32, 3), tiles=array(U32, 3),
)  # fmt: skip
PUSHING_BLOCKS, LANES = 32, 8
"""Blocks that push, and lanes of a warp side by side: tiles then fade in whole warps, and a warp writes lines of 128 bytes."""
UNITS = {2: "u16", 4: "u32", 8: "u64", 16: "Vec16"}


class Axis:
    """The tiles of one axis: ``size`` latents, tiles of ``tile``, whose part ``overlap`` overlaps, ``factor`` pixels for a latent."""

    def __init__(self, size: int, tile: int, overlap: float, factor: int) -> None:
        self.tile, self.factor, self.stride = tile, factor, int(tile * (1 - overlap))
        if self.stride < 1:
            raise ValueError(f"tiles of {tile} with an overlap of {overlap} have a stride of {self.stride}: expected a positive one")
        self.extents = [min(tile, size - first) for first in range(0, size, self.stride)]
        self.blend = int(tile * factor * overlap)
        self.cell = math.gcd(factor, self.blend)

    def latents(self, pixel: int, tile: int) -> tuple[list[int], float]:
        """Returns the latents before, at and behind a pixel of a tile, and how far the pixel is from the middle one."""
        nearest, first, last = pixel // self.factor, tile * self.stride, self.extents[tile] - 1
        return [first + min(max(nearest + i, 0), last) for i in (-1, 0, 1)], (pixel % self.factor + 0.5) / self.factor - 0.5

    def cells(self, pixels_of_a_cell: int) -> list[tuple[float, ...]]:
        """Returns ``Cell`` of every few pixels: words that are two numbers of 16 bits, and four floats."""
        cells: list[tuple[float, ...]] = []
        pixels = [extent * self.factor for extent in self.extents]
        for tile, count in enumerate(pixels):
            fade = min(pixels[tile - 1], count, self.blend) if tile else 0
            for pixel in range(0, min(count, self.tile * self.factor - self.blend), pixels_of_a_cell):
                fades = pixel < fade
                own, place = self.latents(pixel, tile)
                faded, faded_place = self.latents(pixels[tile - 1] - fade + pixel, tile - 1) if fades else (own, place)
                halves = [*own, tile, *faded, int(fades)]
                words = [low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True)]
                cells.append((*words, place, faded_place, pixel / fade if fades else 1.0, 1 / fade if fades else 0.0))
        return cells


def mixed(rows: list[tuple[float, ...]], floats: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns 32-bit words: bits of floats in the columns ``floats``, integers elsewhere."""
    columns = [
        torch.tensor(column, dtype=torch.float32 if i in floats else torch.int32) for i, column in enumerate(zip(*rows, strict=True))
    ]
    return torch.stack([column.view(torch.int32) for column in columns], 1).to(device)


@per_group
def decode_tiles(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype, tile: tuple[int, ...], overlaps: tuple[float, ...], factors: tuple[int, ...]
) -> tuple[BoundKernel, list[torch.Tensor], list[int]]:
    images, channels, *size = shape
    if max(size) >= 1 << 15:
        raise UsageError(f"got latents of {size}: expected fewer than 2^15 along each axis")
    axes = [Axis(*of_axis) for of_axis in zip(size, tile, overlaps, factors, strict=True)]
    pixels = [1, axes[1].cell, axes[2].cell]
    cells = [axis.cells(count) for axis, count in zip(axes, pixels, strict=True)]
    # Tiles are dealt out by their number of latents, the largest first, ties by place.
    grid = list(itertools.product(*([range(i * axis.stride, i * axis.stride + n) for i, n in enumerate(axis.extents)] for axis in axes)))
    owners = torch.empty(len(grid), dtype=torch.int32)
    owners[sorted(range(len(grid)), key=lambda i: -math.prod(map(len, grid[i])))] = (
        torch.arange(len(grid), dtype=torch.int32) % group.world_size
    )
    covered = torch.zeros(size, dtype=torch.bool)
    for part, owner in zip(grid, owners.tolist(), strict=True):
        if owner == group.rank:
            covered[tuple(slice(along.start, along.stop) for along in part)] = True
    unit = math.gcd(16, covered.numel() * dtype.itemsize)
    units = covered.view(-1, unit // dtype.itemsize).any(1).nonzero().flatten().int()
    kept = [mixed(list(itertools.chain(*cells)), (4, 5, 6, 7), group.device), owners.to(group.device), units.to(group.device)]
    pushing = min(PUSHING_BLOCKS, group.sm_count)
    bound = DECODE_TILES.bind(
        group,
        grid=group.sm_count,
        block=min(768, group.max_threads),
        defines={
            "ELEMENT": element_type(dtype), "UNIT": UNITS[unit], "PUSHING": pushing, "LANES": LANES, "FACTOR": factors[2],
            "CELL_LINES": pixels[1], "CELL_COLUMNS": pixels[2], "FRAMES": len(cells[0]), "LINES": len(cells[1]), "COLUMNS": len(cells[2]),
            "PLANES": min(channels, 3),
        },
        sizes={"flags": pushing, "latents": 2 * group.world_size * images * min(channels, 3) * covered.numel() * dtype.itemsize},
        resident=True,
    )  # fmt: skip
    bound.set(places=kept[0], owners=kept[1], covered=kept[2], units=units.numel(), images=images, channels=channels, size=size)
    bound.set(tiles=[len(axis.extents) for axis in axes])
    return bound, kept, [len(along) * count for along, count in zip(cells, pixels, strict=True)]


def solution(
    z: torch.Tensor,
    tile_latent_min_length: int,
    tile_latent_min_height: int,
    tile_latent_min_width: int,
    spatial_tile_overlap_factor: float,
    temporal_tile_overlap_factor: float,
    spatial_upsample: int,
    temporal_upsample: int,
    sr_ratio: int = 1,
    first_frame_as_image: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    tile = (tile_latent_min_length + int(first_frame_as_image), tile_latent_min_height, tile_latent_min_width)
    overlaps = (temporal_tile_overlap_factor, spatial_tile_overlap_factor, spatial_tile_overlap_factor)
    factors = (temporal_upsample, spatial_upsample * sr_ratio, spatial_upsample * sr_ratio)
    launch, _, out_size = decode_tiles(group_of(group), tuple(z.shape), z.dtype, tile, overlaps, factors)
    video = z.new_empty((z.shape[0], 3, *out_size), dtype=torch.bfloat16)
    launch(z=z.contiguous() if z.data_ptr() % 16 == 0 else z.clone(memory_format=torch.contiguous_format), video=video)
    return video
