"""Problem 71, causal depthwise convolution in zigzag layout: one kernel sends borders, convolves the rest meanwhile, and then the edges.

A border goes to a neighbour, k - 1 samples of a channel. Bound by HBM: samples are read once and written once. The public shape is
bound by the launch, HBM and one trip of a flag behind the convolution. Borders lie in one of two buffers by the launch's parity.
Neighbours signal each other in every launch, so a rank that has finished one knows that they have finished the one before."""

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int history = TAPS - 1, reach = (history + row_lanes - 1) / row_lanes * row_lanes, bytes = 4 / ELEMENT::lanes;

// Chunk `chunk` of a row of channels, with the border before it: null where the sequence begins.
struct Chunk {
    RowOf<ELEMENT> row;
    const char* border;

    __device__ void load(int first, float (&value)[row_lanes]) const {
        if (first >= 0) return row.load(first, value);
        for (int e = 0; e < row_lanes; ++e) {
            value[e] = border != nullptr && first + e >= -history ? element_of<ELEMENT>(border, history + first + e) : 0.0f;
        }
    }
};

// Eight outputs from `first` on. Their inputs are vectors that begin `reach` samples before; taps that do not exist are left out.
__device__ void convolve(const HaloConvolution& args, const Chunk& chunk, u32 row, u32 half, u32 first) {
    float sum[row_lanes] = {}, now[row_lanes], next[row_lanes];
    chunk.load(int(first) - reach, now);
    for (int group = 0; group <= reach / row_lanes; ++group) {
        if (group < reach / row_lanes) chunk.load(int(first) - reach + (group + 1) * row_lanes, next);
#pragma unroll
        for (int i = 0; i < row_lanes; ++i) {
            const int tap = group * row_lanes + i - (reach - history);
            if (tap < 0 || tap >= TAPS) continue;
            const float weight = element_of<ELEMENT>(args.weight, u64(row % args.channels) * TAPS + tap);
#pragma unroll
            for (int e = 0; e < row_lanes; ++e) {
                sum[e] += weight * (e + i < row_lanes ? now[(e + i) % row_lanes] : next[(e + i) % row_lanes]);
            }
        }
#pragma unroll
        for (int e = 0; e < row_lanes; ++e) now[e] = next[e];
    }
    RowOf<ELEMENT>(args.out, u64(2) * row + half, args.length).store(first, sum);
}

// All outputs of a chunk behind the first eight, of two to nine taps. Rows begin at multiples of 16 bytes. A lane has some vectors under
// way at a time, each with the one before it, which is in L1.
__device__ void convolve_inside(const HaloConvolution& args, u32 row, u32 half) {
    constexpr u32 vectors = bytes * row_lanes / sizeof(Vec16), words = 4 * vectors, at_once = 4 / vectors;
    const u64 begin = (u64(2) * row + half) * args.length * bytes;
    const Vec16* const in = reinterpret_cast<const Vec16*>(args.x + begin);
    Vec16* const out = reinterpret_cast<Vec16*>(args.out + begin);
    float weight[TAPS];
#pragma unroll
    for (u32 tap = 0; tap < TAPS; ++tap) weight[tap] = element_of<ELEMENT>(args.weight, u64(row % args.channels) * TAPS + tap);
    const u32 places = args.length / row_lanes;
    for (u32 first = Warp{}.thread(); first < places; first += at_once * warp_threads) {
        Vec16 loaded[at_once][2 * vectors] = {};
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            const u32 place = first + i * warp_threads;
            if (place == 0 || place >= places) continue;
#pragma unroll
            for (u32 v = 0; v < 2 * vectors; ++v) loaded[i][v] = in[(place - 1) * vectors + v];
        }
#pragma unroll
        for (u32 i = 0; i < at_once; ++i) {
            const u32 place = first + i * warp_threads;
            if (place == 0 || place >= places) continue;
            float value[2 * row_lanes], sum[row_lanes] = {};
            Vec16 result[vectors];
#pragma unroll
            for (u32 w = 0; w < 2 * words; ++w) ELEMENT::widen(loaded[i][w / 4].word[w % 4], value + w * ELEMENT::lanes);
#pragma unroll
            for (u32 tap = 0; tap < TAPS; ++tap) {
#pragma unroll
                for (u32 e = 0; e < row_lanes; ++e) sum[e] += weight[tap] * value[(row_lanes - history + tap + e) % (2 * row_lanes)];
            }
#pragma unroll
            for (u32 w = 0; w < words; ++w) result[w / 4].word[w % 4] = ELEMENT::narrow(sum + w * ELEMENT::lanes);
#pragma unroll
            for (u32 v = 0; v < vectors; ++v) out[place * vectors + v] = result[v];
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    halo_convolution(const __grid_constant__ Arena arena, const __grid_constant__ HaloConvolution args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const int rank = arena.rank, before = rank > 0 ? rank - 1 : -1, after = rank + 1 < WORLD_SIZE ? rank + 1 : -1;
    const u64 border = u64(history) * bytes, side = args.rows * border, borders = args.borders + (epoch & 1) * 2 * side;
    const auto row_of = [&](u32 row, u32 half) { return args.x + (u64(2) * row + half) * args.length * bytes; };
    const auto tail = [&](u32 row, u32 half) { return row_of(row, half) + u64(args.length) * bytes - border; };
    // The next chunk of the sequence is the next rank's first, and the previous rank's second.
    each_row(args.rows, [&](u32 row) {
        if (after >= 0) copy_bytes(Warp{}, arena.peer(after, borders + row * border), tail(row, 0), border);
        if (before >= 0) copy_bytes(Warp{}, arena.peer(before, borders + side + row * border), tail(row, 1), border);
    });
    if (after >= 0) peers.signal(after, blockIdx.x, epoch);
    if (before >= 0) peers.signal(before, blockIdx.x, epoch);
    const bool vectors = args.length % row_lanes == 0 && aligned_for<Vec16>(args.x);
    for (int edge = 0; edge < 2; ++edge) {
        if (edge && before >= 0) peers.wait(before, blockIdx.x, epoch);  // a row has the same block on every rank
        if (edge && after >= 0) peers.wait(after, blockIdx.x, epoch);
        each_row(args.rows, [&](u32 row) {
            for (u32 half = 0; half < 2; ++half) {
                const char* from = half == 0 ? before >= 0 ? arena.local(borders + row * border) : nullptr
                                             : after >= 0 ? arena.local(borders + side + row * border) : tail(row, 0);
                if constexpr (reach == row_lanes) {
                    if (vectors && edge == 0) {
                        convolve_inside(args, row, half);
                        continue;
                    }
                }
                const Chunk chunk{RowOf<ELEMENT>(args.x, u64(2) * row + half, args.length), from};
                each_column(edge == 1 ? min(args.length, u32(reach)) : args.length, [&](u32 first) {
                    if ((int(first) < reach) == (edge == 1)) convolve(args, chunk, row, half, first);
                });
            }
        });
    }
}
"""
HALO_CONVOLUTION = DeclaredKernel(
    "halo_convolution", SOURCE, epochs=Epochs(), flags=Flags(), borders=Buffer(), x=Pointer("const char*"), weight=Pointer("const char*"),
    out=Pointer(), rows=U32, channels=U32, length=U32,
)  # fmt: skip


@per_group
def halo_convolution(group: Group, shape: tuple[int, ...], taps: int, dtype: torch.dtype) -> BoundKernel:
    batch, channels, length = shape
    grid = min(group.sm_count, batch * channels)
    return HALO_CONVOLUTION.bind(
        group,
        grid=grid,
        block=min(1024, group.max_threads),
        defines={"ELEMENT": element_type(dtype), "TAPS": taps},
        sizes={"flags": grid, "borders": 4 * batch * channels * (taps - 1) * dtype.itemsize},
        rows=batch * channels,
        channels=channels,
        length=length // 2,
    )


def solution(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = halo_convolution(group_of(group), tuple(x.shape), weight.shape[-1], x.dtype)
    launch(x=x.contiguous(), weight=weight.contiguous(), out=out)
    return out
