"""Problem 78, tiles of a video decoded and blended: one launch exchanges latents, which are small, and writes every pixel once.

A pixel mixes at most four decoded tiles, so that every rank decodes what it needs: a warp takes a row of pixels, interpolates latents along
time and height into shared memory, and then along the width. Tables made on the first call say where a pixel's tiles and latents are. Bound
by HBM, which takes the pixels. A graph can capture it."""

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

// Where a pixel lies along an axis: two latents (16 bits each) of its tile and the second one's weight; those of the tile that fades out,
// or none; and the tile's own weight.
namespace peerlane {
struct Place {
    u32 own;
    float second;
    u32 before;
    float weight;
};
struct Side {
    float second;  // of the tile that fades out
    u32 tile;
};
}  // namespace peerlane
constexpr u32 none = ~0u;

__device__ float mix(float first, float second, float weight) { return first * (1.0f - weight) + second * weight; }

extern "C" __global__ void __launch_bounds__(512)
    decode_tiles(const __grid_constant__ Arena arena, const __grid_constant__ DecodeTiles args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const auto [length, height, width] = args.size;
    const u32 channel = length * height * width, total = args.images * 3 * channel;
    // Two buffers by parity: a rank that has begun the launch after next has heard of this one's end everywhere.
    const u64 latents = args.latents + (epoch & 1) * WORLD_SIZE * total * sizeof(BITS);
    if (blockIdx.x < PUSHING) {
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += PUSHING * blockDim.x) {
            const u32 plane = i / channel, from = plane / 3 * args.channels + plane % 3 % args.channels;
            const BITS value = args.z[u64(from) * channel + i % channel];
            for (int k = 0; k < WORLD_SIZE; ++k) {
                reinterpret_cast<BITS*>(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), latents))[arena.rank * total + i] = value;
            }
        }
        peers.signal_all(blockIdx.x, epoch);
        peers.signal(arena.rank, blockIdx.x, epoch);
    }
    for (int q = 0; q < WORLD_SIZE; ++q) peers.wait_slots(q, 0, PUSHING, epoch);

    const auto [frames, lines, columns] = args.out_size;
    const u32 slots = args.tiles[2] * args.tile_width, lane = Warp{}.thread();
    float* const shared = reinterpret_cast<float*>(ptx::dynamic_shared()) + threadIdx.x / warp_threads * 3 * slots;
    const Place* const places[3] = {args.places, args.places + frames, args.places + frames + lines};
    const Side* const sides[3] = {args.sides, args.sides + frames, args.sides + frames + lines};
    each_row(args.images * 3 * frames * lines, [&](u32 row) {
        const u32 frame = row / lines % frames, line = row % lines, plane = row / lines / frames;
        const Place t = places[0][frame], y = places[1][line];
        const u32 tile_t = sides[0][frame].tile, tile_y = sides[1][line].tile;
        const float faded_t = sides[0][frame].second, faded_y = sides[1][line].second;
        for (u32 slot = lane; slot < slots; slot += warp_threads) {
            const u32 tile = slot / args.tile_width, x = tile * args.stride_width + slot % args.tile_width;
            if (x >= width) continue;
            const auto between = [&](u32 at_t, u32 at_y, u32 ts, float second_t, u32 ys, float second_y) {
                const u32 owner = args.owners[(at_t * args.tiles[1] + at_y) * args.tiles[2] + tile];
                const auto latent = [&](u32 time, u32 down) {
                    const u32 at = ((plane * length + time) * height + down) * width + x;
                    return element_of<ELEMENT>(arena.local(latents), u64(owner) * total + at);
                };
                const u32 up = ys & 0xffff, down = ys >> 16;
                const float first = mix(latent(ts & 0xffff, up), latent(ts & 0xffff, down), second_y);
                return mix(first, mix(latent(ts >> 16, up), latent(ts >> 16, down), second_y), second_t);
            };
            shared[slot] = between(tile_t, tile_y, t.own, t.second, y.own, y.second);
            if (t.before != none) shared[slots + slot] = between(tile_t - 1, tile_y, t.before, faded_t, y.own, y.second);
            if (y.before != none) shared[2 * slots + slot] = between(tile_t, tile_y - 1, t.own, t.second, y.before, faded_y);
        }
        __syncwarp();
        each_column(columns, [&](u32 column) {
            float value[row_lanes], other[row_lanes];
            const auto decode = [&](u32 part, float (&pixel)[row_lanes]) {
                for (u32 e = 0; e < row_lanes; ++e) {
                    const Place x = places[2][min(column + e, columns - 1)];
                    pixel[e] = mix(shared[part * slots + (x.own & 0xffff)], shared[part * slots + (x.own >> 16)], x.second);
                }
                round_as<BFloat16>(pixel);
            };
            const auto fade_in = [&](u32 part, float weight) {
                decode(part, other);
                for (u32 e = 0; e < row_lanes; ++e) value[e] = mix(other[e], value[e], weight);
            };
            decode(0, value);
            if (t.before != none) fade_in(1, t.weight);
            if (y.before != none) fade_in(2, y.weight);
            for (u32 e = 0; e < row_lanes; ++e) {
                const u32 at = min(column + e, columns - 1);
                const Place x = places[2][at];
                other[e] = x.before == none ? 0.0f : mix(shared[x.before & 0xffff], shared[x.before >> 16], sides[2][at].second);
            }
            round_as<BFloat16>(other);
            for (u32 e = 0; e < row_lanes; ++e) {
                const Place x = places[2][min(column + e, columns - 1)];
                if (x.before != none) value[e] = mix(other[e], value[e], x.weight);
            }
            RowOf<BFloat16>(args.video, row, columns).store(column, value);
        });
        __syncwarp();
    });
}
"""
DECODE_TILES = DeclaredKernel(
    "decode_tiles", SOURCE, epochs=Epochs(), flags=Flags(), latents=Buffer(), z=Pointer("const BITS*"), video=Pointer(),
    places=Pointer("const struct Place*"), sides=Pointer("const struct Side*"), owners=Pointer("const u32*"), images=U32, channels=U32,
    size=array(U32, 3), out_size=array(U32, 3), tiles=array(U32, 3), tile_width=U32, stride_width=U32,
)  # fmt: skip
PUSHING_BLOCKS, SHARED_BYTES, NONE = 16, 96 << 10, -1


class Axis:
    """The tiles of one axis: ``size`` latents, tiles of ``tile``, whose part ``overlap`` overlaps, ``factor`` pixels for a latent."""

    def __init__(self, size: int, tile: int, overlap: float, factor: int) -> None:
        self.tile, self.factor, self.stride = tile, factor, int(tile * (1 - overlap))
        if self.stride < 1:
            raise ValueError(f"tiles of {tile} with an overlap of {overlap} have a stride of {self.stride}: expected a positive one")
        self.extents = [min(tile, size - first) for first in range(0, size, self.stride)]
        self.blend = int(tile * factor * overlap)

    def latents(self, pixel: int, tile: int, spread: int) -> tuple[int, float]:
        """Returns the two latents around a pixel of a tile, tiles being ``spread`` apart, and the second one's weight."""
        place = max((pixel + 0.5) / self.factor - 0.5, 0.0)
        first, base = int(place), tile * spread
        return base + first | base + min(first + 1, self.extents[tile] - 1) << 16, place - first

    def table(self, spread: int) -> tuple[list[tuple[int, float, int, float]], list[tuple[float, int]]]:
        """Returns ``Place`` and ``Side`` of every pixel."""
        places, sides = [], []
        pixels = [extent * self.factor for extent in self.extents]
        for tile, count in enumerate(pixels):
            fade = min(pixels[tile - 1], count, self.blend) if tile else 0
            for pixel in range(min(count, self.tile * self.factor - self.blend)):
                before, second, weight = NONE, 0.0, 1.0
                if pixel < fade:
                    before, second = self.latents(pixels[tile - 1] - fade + pixel, tile - 1, spread)
                    weight = pixel / fade
                places.append((*self.latents(pixel, tile, spread), before, weight))
                sides.append((second, tile))
        return places, sides


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
    size = shape[2:]
    axes = [Axis(*of_axis) for of_axis in zip(size, tile, overlaps, factors, strict=True)]
    tables = [axis.table(axis.tile if axis is axes[2] else axis.stride) for axis in axes]
    places = mixed(list(itertools.chain(*(table[0] for table in tables))), (1, 3), group.device)
    sides = mixed(list(itertools.chain(*(table[1] for table in tables))), (0,), group.device)
    # Tiles are dealt out by their number of latents, the largest first, ties by place.
    grid = [math.prod(extents) for extents in itertools.product(*(axis.extents for axis in axes))]
    owners = torch.empty(len(grid), dtype=torch.int32)
    owners[sorted(range(len(grid)), key=lambda i: -grid[i])] = torch.arange(len(grid), dtype=torch.int32) % group.world_size
    kept = [places, sides, owners.to(group.device)]
    row_bytes = 12 * len(axes[2].extents) * tile[2]
    if row_bytes > SHARED_BYTES or max(*size, row_bytes // 12) >= 1 << 16:
        raise UsageError(
            f"latents of {size} in tiles of {tile}: expected fewer than 2^16, and at most {SHARED_BYTES // 12} in a row of tiles"
        )
    warps = max(1, min(group.max_threads // 32, 16, SHARED_BYTES // row_bytes))
    pushing = min(PUSHING_BLOCKS, group.sm_count)
    bound = DECODE_TILES.bind(
        group,
        grid=group.sm_count,
        block=32 * warps,
        defines={"ELEMENT": element_type(dtype), "BITS": f"u{8 * dtype.itemsize}", "PUSHING": pushing},
        sizes={"flags": pushing, "latents": 2 * group.world_size * shape[0] * 3 * math.prod(size) * dtype.itemsize},
        shared_bytes=warps * row_bytes,
        resident=True,
    )
    out_size = [len(table[0]) for table in tables]
    bound.set(places=kept[0], sides=kept[1], owners=kept[2], images=shape[0], channels=shape[1], size=size, out_size=out_size)
    bound.set(tiles=[len(axis.extents) for axis in axes], tile_width=tile[2], stride_width=axes[2].stride)
    return bound, kept, out_size


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
    launch(z=z.contiguous(), video=video)
    return video
