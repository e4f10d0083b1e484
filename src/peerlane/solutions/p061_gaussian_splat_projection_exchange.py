"""Problem 61, Gaussians seen by all ranks' cameras: one kernel marks what is seen, counts it, and stores every row where it belongs.

Blocks take stretches of Gaussians and leave a bit for each Gaussian and camera. Once ranks know each other's counts, they tell the host
the result's size and go on. Rows travel packed, in bulk. They have the covariance in the picture: the camera's rank computes conic and
radii when it unpacks them. Bound by the links. If rows do not fit, all ranks see so, make room and launch again.

The next call overwrites the results, which lie in the arena."""

import math

import torch

from peerlane.device import F32, U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Packets, Pointer, group_of, per_group
from peerlane.device.collectives.counts import HostWords
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/moe/moe.cuh>
using namespace peerlane;

// Rows of the view matrix, then of the intrinsics. A block keeps the borders of the Jacobian's point behind them.
constexpr u32 view_floats = 16, camera_floats = 25, camera_packets = 9, kept_floats = camera_floats + 4;
struct Triple { u32 word[packet_words]; };

struct Raw {
    float mean[3], quat[4], scale[3];

    __device__ Raw(const SplatRows& args, u32 g) {
        for (int i = 0; i < 3; ++i) mean[i] = args.means[3 * u64(g) + i], scale[i] = args.scales[3 * u64(g) + i];
        for (int i = 0; i < 4; ++i) quat[i] = args.quats[4 * u64(g) + i];
    }
};

// A covariance is factor factor^T.
struct Gaussian {
    float mean[3], factor[3][3];

    __device__ explicit Gaussian(const Raw& raw) {
        float square = 0.0f;
        for (int i = 0; i < 4; ++i) square += raw.quat[i] * raw.quat[i];
        const float inverse = 1.0f / fmaxf(sqrtf(square), 1e-12f);
        const float w = raw.quat[0] * inverse, x = raw.quat[1] * inverse, y = raw.quat[2] * inverse, z = raw.quat[3] * inverse;
        const float rotation[3][3] = {
            {1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)},
            {2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)},
            {2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)},
        };
        for (int i = 0; i < 3; ++i) {
            mean[i] = raw.mean[i];
            for (int j = 0; j < 3; ++j) factor[i][j] = rotation[i][j] * raw.scale[j];
        }
    }
};

__device__ inline float radius(float variance) { return ceilf(3.33f * sqrtf(variance)); }

struct Projection {
    float x, y, depth, a, b, d;  // a, b, d: of the covariance in the picture

    __device__ Projection(const SplatRows& args, const Gaussian& gaussian, const float* view) {
        const float *k = view + view_floats, *low = view + camera_floats, *high = low + 2;
        float p[3], turned[3][3];
        for (int i = 0; i < 3; ++i) {
            const float* row = view + 4 * i;
            p[i] = row[0] * gaussian.mean[0] + row[1] * gaussian.mean[1] + row[2] * gaussian.mean[2] + row[3];
            for (int j = 0; j < 3; ++j) {
                turned[i][j] = row[0] * gaussian.factor[0][j] + row[1] * gaussian.factor[1][j] + row[2] * gaussian.factor[2][j];
            }
        }
        const float inverse = 1.0f / p[2], scale_x = k[0] * inverse, scale_y = k[4] * inverse;
        x = (k[0] * p[0] + k[1] * p[1] + k[2] * p[2]) * inverse, y = (k[3] * p[0] + k[4] * p[1] + k[5] * p[2]) * inverse, depth = p[2];
        const float u = fminf(fmaxf(p[0] * inverse, low[0]), high[0]), v = fminf(fmaxf(p[1] * inverse, low[1]), high[1]);
        a = d = args.eps2d, b = 0.0f;
        for (int j = 0; j < 3; ++j) {
            const float along_x = scale_x * (turned[0][j] - u * turned[2][j]), along_y = scale_y * (turned[1][j] - v * turned[2][j]);
            a += along_x * along_x, b += along_x * along_y, d += along_y * along_y;
        }
    }
    __device__ bool seen(const SplatRows& args) const {
        const float r = radius(a), s = radius(d);
        const bool inside = x + r > 0 && x - r < args.width && y + s > 0 && y - s < args.height;
        return inside && r > 0 && s > 0 && depth > args.near && depth < args.far;
    }
};

// A row on its way: these words, then its colours. A multiple of 16 bytes.
struct Packed { float x, y, depth, a, b, d, opacity; u32 gaussian, camera; };

// Rows of shared memory to their places in the results, from row `first` on: at most one for each lane. By a warp.
__device__ inline void unpack(const Arena& arena, const SplatRows& args, const char* rows, u32 count, u32 first) {
    const auto row = [&](u32 i) -> const Packed& { return *reinterpret_cast<const Packed*>(rows + i * args.row_bytes); };
    const auto floats = [&](u64 offset, u32 width) { return reinterpret_cast<float*>(arena.local(offset)) + u64(first) * width; };
    const u32 lane = Warp{}.thread();
    if (lane < count) {
        reinterpret_cast<u64*>(arena.local(args.camera_ids))[first + lane] = row(lane).camera;
        reinterpret_cast<u64*>(arena.local(args.gaussian_ids))[first + lane] = row(lane).gaussian;
        floats(args.depths, 1)[lane] = row(lane).depth, floats(args.opacities_out, 1)[lane] = row(lane).opacity;
    }
    for (u32 i = lane; i < 2 * count; i += warp_threads) {
        const Packed& from = row(i / 2);
        floats(args.means2d, 2)[i] = i % 2 ? from.y : from.x;
        reinterpret_cast<int*>(floats(args.radii, 2))[i] = int(radius(i % 2 ? from.d : from.a));
    }
    for (u32 i = lane; i < 3 * count; i += warp_threads) {
        const Packed& from = row(i / 3);
        const float determinant = fmaxf(from.a * from.d - from.b * from.b, 1e-10f);
        floats(args.conics, 3)[i] = (i % 3 == 0 ? from.d : i % 3 == 1 ? -from.b : from.a) / determinant;
    }
    for (u32 i = lane; i < CHANNELS * count; i += warp_threads) {
        floats(args.colors_out, CHANNELS)[i] = reinterpret_cast<const float*>(&row(i / CHANNELS) + 1)[i % CHANNELS];
    }
}

// A warp has a stretch of words, each of which is 32 Gaussians.
extern "C" __global__ void __launch_bounds__(512)
    splat_rows(const __grid_constant__ Arena arena, const __grid_constant__ SplatRows args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), rank = arena.rank;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const Peers<WORLD_SIZE, Warp> of_warp(arena, args.flags);
    const u32 own = args.own_cameras, cameras = WORLD_SIZE * own, words = (args.gaussians + 31) / 32;
    const u32 warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads, lane = Warp{}.thread();
    const Part part = part_of(words, blockIdx.x * warps + warp, gridDim.x * warps);
    __shared__ u32 sent[WORLD_SIZE], table[WORLD_SIZE][WORLD_SIZE], gaussians[WORLD_SIZE];
    const u32 tile_bytes = warp_threads * args.row_bytes;
    char* tiles = ptx::dynamic_shared() + warp * 3 * tile_bytes;  // of the warp: two for rows to others, and one for own ones
    float* views = reinterpret_cast<float*>(ptx::dynamic_shared() + warps * 3 * tile_bytes);
    u32 *before = reinterpret_cast<u32*>(views + cameras * kept_floats), *totals = before + cameras;  // by camera
    u32* next = totals + cameras + warp * cameras;  // of the warp by camera: how many rows, and then where the next one goes

    const SmallExchange<WORLD_SIZE, Triple> of_cameras(arena, args.views, epoch), of_counts(arena, args.totals, epoch);
    if (blockIdx.x == 0) {
        for (u32 i = threadIdx.x; i < own * camera_packets; i += blockDim.x) {
            Triple value{};
            for (u32 w = 0; w < packet_words; ++w) {
                const u32 camera = i / camera_packets, at = i % camera_packets * packet_words + w;
                if (at >= camera_floats) continue;
                const bool in_view = at < view_floats;
                value.word[w] = __float_as_uint(in_view ? args.viewmats[camera * view_floats + at]
                                                        : args.intrinsics[camera * (camera_floats - view_floats) + at - view_floats]);
            }
            of_cameras.send_everywhere(i, value);
        }
    }
    for (u32 i = threadIdx.x; i < cameras * camera_packets; i += blockDim.x) {
        const Triple value = of_cameras.receive_from(i / (own * camera_packets), i % (own * camera_packets));
        for (u32 w = 0; w < packet_words; ++w) {
            const u32 at = i % camera_packets * packet_words + w;
            if (at < camera_floats) views[i / camera_packets * kept_floats + at] = __uint_as_float(value.word[w]);
        }
    }
    for (u32 c = lane; c < cameras; c += warp_threads) next[c] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2 * cameras; i += blockDim.x) {
        float* view = views + i / 2 * kept_floats;
        const float *k = view + view_floats, focal = k[4 * (i % 2)], centre = k[2 + 3 * (i % 2)], size = i % 2 ? args.height : args.width;
        const float beyond = 0.15f * size / focal;
        view[camera_floats + i % 2] = -(centre / focal + beyond), view[camera_floats + 2 + i % 2] = (size - centre) / focal + beyond;
    }
    __syncthreads();

    const auto gaussian_of = [&](u64 word) { return static_cast<u32>(min(word * 32 + lane, u64(args.gaussians - 1))); };
    if (part.first < part.end) {
        Raw ahead(args, gaussian_of(part.first));
        for (u64 word = part.first; word < part.end; ++word) {
            const Gaussian gaussian(ahead);
            if (word + 1 < part.end) ahead = Raw(args, gaussian_of(word + 1));
            for (u32 c = 0; c < cameras; ++c) {
                const bool seen = Projection(args, gaussian, views + c * kept_floats).seen(args) && word * 32 + lane < args.gaussians;
                const u32 mask = __ballot_sync(full_warp, seen);
                if (lane == 0) args.masks[word * cameras + c] = mask, next[c] += __popc(mask);
            }
        }
    }
    __syncthreads();
    u32* counts = reinterpret_cast<u32*>(arena.local(args.counts));  // [block][camera]
    for (u32 c = threadIdx.x; c < cameras; c += blockDim.x) {
        u32 sum = 0;
        for (u32 w = 0; w < warps; ++w) {
            u32& of_one = totals[(1 + w) * cameras + c];
            const u32 count = of_one;
            of_one = sum, sum += count;
        }
        counts[blockIdx.x * cameras + c] = sum;
    }
    meet_blocks(peers, arena, 0, epoch);
    for (u32 c = warp; c < cameras; c += warps) {
        u32 lower = 0, all = 0;
        for (u32 b = lane; b < gridDim.x; b += warp_threads) {
            const u32 count = counts[b * cameras + c];
            all += count, lower += b < blockIdx.x ? count : 0;
        }
        lower = warp_sum(lower), all = warp_sum(all);
        if (lane == 0) before[c] = lower, totals[c] = all;
    }
    __syncthreads();

    // Every rank's rows for every other one.
    if (threadIdx.x < WORLD_SIZE) {
        const u32 q = threadIdx.x;
        u32 sum = 0;
        for (u32 c = q * own; c < (q + 1) * own; ++c) before[c] += sum, sum += totals[c];
        sent[q] = sum;
        if (blockIdx.x == 0) of_counts.send_everywhere(q, Triple{{sum, args.gaussians, 0}});
    }
    for (u32 i = threadIdx.x; i < WORLD_SIZE * WORLD_SIZE; i += blockDim.x) {
        const Triple value = of_counts.receive_from(i / WORLD_SIZE, i % WORLD_SIZE);
        table[i / WORLD_SIZE][i % WORLD_SIZE] = value.word[0];
        if (i % WORLD_SIZE == 0) gaussians[i / WORLD_SIZE] = value.word[1];
    }
    const bool told = block_arrived(arena);  // all ranks have begun the launch: their callers have read the rows of the one before
    const auto rows_before = [&](u32 source, u32 q) {
        u32 sum = 0;
        for (u32 r = 0; r < source; ++r) sum += table[r][q];
        return sum;
    };
    const u32 received = rows_before(WORLD_SIZE, rank), begin_own = rows_before(rank, rank);
    u32 most = 0, first = 0;
    for (u32 q = 0; q < WORLD_SIZE; ++q) most = max(most, rows_before(WORLD_SIZE, q)), first += q < rank ? gaussians[q] : 0;
    if (told && blockIdx.x == 0 && threadIdx.x == 0) {
        args.host[1] = received, args.host[2] = most;
        tell_host(args.host, args.stamp);
    }
    if (!told || most > args.capacity) return;  // all ranks alike
    for (u32 c = lane; c < cameras; c += warp_threads) next[c] += before[c] + rows_before(rank, c / own);

    // Cameras in turn, beginning with those of the next rank.
    const auto camera_at = [&](u32 turn) { return (turn + (rank + 1) * own) % cameras; };
    const auto masks_of = [&](u64 word, u32 turn) {
        return turn + lane < cameras ? args.masks[word * cameras + camera_at(turn + lane)] : 0;
    };
    if (part.first < part.end) {
        Raw ahead(args, gaussian_of(part.first));
        u32 tile = 0, masks_ahead = masks_of(part.first, 0);
        for (u64 word = part.first; word < part.end; ++word) {
            const u32 g = gaussian_of(word);
            const Gaussian gaussian(ahead);
            u32 masks = masks_ahead;
            if (word + 1 < part.end) ahead = Raw(args, gaussian_of(word + 1)), masks_ahead = masks_of(word + 1, 0);
            constexpr u32 held = CHANNELS <= 4 ? CHANNELS : 1;
            const float opacity = args.opacities[g], *from = args.colors + u64(g) * CHANNELS;
            float color[held];
            for (u32 i = 0; i < held; ++i) color[i] = from[i];
            for (u32 turn = 0; turn < cameras; ++turn) {
                if (turn > 0 && turn % warp_threads == 0) masks = masks_of(word, turn);
                const u32 mask = __shfl_sync(full_warp, masks, turn % warp_threads), c = camera_at(turn), owner = c / own;
                if (mask == 0) continue;
                if (lane == 0) ptx::bulk_wait_read<1>();  // the tile that is written now is not the latest one on its way
                __syncwarp();
                const u32 at = next[c], count = __popc(mask);
                char* rows = tiles + (owner == rank ? 2 : tile) * tile_bytes;
                if (mask >> lane & 1) {
                    const Projection p(args, gaussian, views + c * kept_floats);
                    Packed* row = reinterpret_cast<Packed*>(rows + __popc(mask & ((1u << lane) - 1)) * args.row_bytes);
                    *row = {p.x, p.y, p.depth, p.a, p.b, p.d, opacity, first + g, c % own};
                    float* colors = reinterpret_cast<float*>(row + 1);
                    for (u32 i = 0; i < held; ++i) colors[i] = color[i];
                    for (u32 i = held; i < CHANNELS; ++i) colors[i] = from[i];
                }
                if (owner == rank) {
                    __syncwarp();
                    unpack(arena, args, rows, count, at);
                } else {
                    of_warp.store_async(owner, args.packed + u64(at) * args.row_bytes, rows, count * args.row_bytes);
                    tile ^= 1;
                }
                if (lane == 0) next[c] = at + count;
            }
        }
    }
    meet_ranks(peers, arena, gridDim.x, epoch);
    if (!block_arrived(arena)) return;
    const auto unpack_all = [&](u32 begin, u32 end) {
        for (u32 at = begin + (blockIdx.x * warps + warp) * warp_threads; at < end; at += gridDim.x * blockDim.x) {
            const u32 count = min(end - at, warp_threads), vectors = count * args.row_bytes / sizeof(Vec16);
            const Vec16* from = reinterpret_cast<const Vec16*>(arena.local(args.packed + u64(at) * args.row_bytes));
            __syncwarp();
            constexpr u32 at_once = 4;
            for (u32 v = lane; v < vectors; v += at_once * warp_threads) {
                Vec16 value[at_once];
#pragma unroll
                for (u32 k = 0; k < at_once; ++k) {
                    if (v + k * warp_threads < vectors) value[k] = from[v + k * warp_threads];
                }
#pragma unroll
                for (u32 k = 0; k < at_once; ++k) {
                    if (v + k * warp_threads < vectors) reinterpret_cast<Vec16*>(tiles)[v + k * warp_threads] = value[k];
                }
            }
            __syncwarp();
            unpack(arena, args, tiles, count, at);
        }
    };
    unpack_all(0, begin_own);
    unpack_all(begin_own + sent[rank], received);
}
"""
RESULTS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "camera_ids": (torch.int64, ()), "gaussian_ids": (torch.int64, ()), "radii": (torch.int32, (2,)), "means2d": (torch.float32, (2,)),
    "depths": (torch.float32, ()), "conics": (torch.float32, (3,)), "opacities_out": (torch.float32, ()),
}  # fmt: skip
INPUTS = ("means", "quats", "scales", "opacities", "colors", "viewmats", "intrinsics")
SPLAT_ROWS = DeclaredKernel(
    "splat_rows", SOURCE, epochs=Epochs(), flags=Flags(), views=Packets(), totals=Packets(), counts=Buffer(), packed=Buffer(),
    **{name: Buffer() for name in (*RESULTS, "colors_out")}, **{name: Pointer("const float*") for name in INPUTS},
    masks=Pointer("u32*"), host=Pointer("u64*"), stamp=U32,
    capacity=U32, gaussians=U32, own_cameras=U32, row_bytes=U32, width=F32, height=F32, eps2d=F32, near=F32, far=F32,
)  # fmt: skip
SHARED_BYTES = 200 << 10


@per_group
def room(group: Group) -> list[int]:
    """Returns the rows of a rank that memory is made for, in a list: what all ranks have seen of the calls before."""
    return [1024]


@per_group
def splat_rows(group: Group, own_cameras: int, channels: int, capacity: int) -> tuple[BoundKernel, HostWords, tuple[torch.Tensor, ...]]:
    """Makes the launch of a group. ``capacity``: of rows at a rank. The host gets how many rows come, and the most that come anywhere.

    Also returns the results' memory."""
    told, grid, cameras = HostWords(group, 2), group.sm_count, group.world_size * own_cameras
    row_bytes = -(-(36 + 4 * channels) // 16) * 16
    block = min(512, group.max_threads)
    while block > 32 and 3 * block * row_bytes > SHARED_BYTES:
        block //= 2
    results = {**RESULTS, "colors_out": (torch.float32, (channels,))}
    sizes = {
        "flags": 2 * grid, "views": 9 * own_cameras, "totals": group.world_size, "counts": 4 * grid * cameras,
        "packed": row_bytes * capacity, **{name: capacity * math.prod(row) * dtype.itemsize for name, (dtype, row) in results.items()},
    }  # fmt: skip
    launch = SPLAT_ROWS.bind(
        group, grid=grid, block=block, shared_bytes=3 * block * row_bytes + cameras * (124 + block // 8), resident=True,
        defines={"CHANNELS": channels}, sizes=sizes, host=told.words, capacity=capacity, own_cameras=own_cameras, row_bytes=row_bytes,
    )  # fmt: skip
    return launch, told, tuple(launch.tensor(name, (capacity, *row), dtype) for name, (dtype, row) in results.items())


def solution(
    means: torch.Tensor,
    quats: torch.Tensor,
    scales: torch.Tensor,
    opacities: torch.Tensor,
    colors: torch.Tensor,
    viewmats: torch.Tensor,
    Ks: torch.Tensor,
    image_width: int,
    image_height: int,
    eps2d: float = 0.3,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    camera_model: str = "pinhole",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if camera_model != "pinhole":
        raise UsageError(f"camera_model is {camera_model!r}: expected 'pinhole'")
    group, channels, own_cameras = group_of(), colors.shape[1], len(viewmats)
    tensors = (means, quats, scales, opacities, colors, viewmats, Ks)
    given = {name: tensor.contiguous() for name, tensor in zip(INPUTS, tensors, strict=True)}
    masks = means.new_empty(max(1, group.world_size * own_cameras * -(-len(means) // 32)))
    fits = room(group)
    while True:
        launch, told, results = splat_rows(group, own_cameras, channels, fits[0])
        launch(
            **given, masks=masks, gaussians=len(means), width=image_width, height=image_height, eps2d=eps2d, near=near_plane,
            far=far_plane, stamp=told.stamp(),
        )  # fmt: skip
        received, most = told.read()
        if most <= fits[0]:
            break
        fits[0] = 1 << most.bit_length()
    ids, numbers, radii, means2d, depths, conics, opacities, colors = (result[:received] for result in results)
    return ids, numbers, radii, means2d, depths, conics, opacities, colors
