"""Problem 62, a convolution on the sphere over a grid of ranks: one gather of longitudes, one kernel of taps, and one sum over latitudes.

Every rank gathers all longitudes of its rows, and makes its own longitudes of the output alone. So channels are mixed before latitudes are
summed: ranks exchange outputs, not the filters' responses, which are K C / C_out times as many. One kernel takes all turns of the sphere,
reads parts where they lie, and needs no transposed copy. Bound by responses in HBM and their product with the weights."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import (
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    array,
    communicator,
    group_of,
    per_group,
)
from peerlane.device.host.group import MAX_RANKS

TAPS = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

constexpr u32 at_once = 8, most_taps = 128;

// y[channel][filter and row][longitude] of this rank. A block takes `at_once` channels of one filter and row, a thread one longitude.
// x lies in parts of `part_columns` longitudes, (channels, bands, part_columns) each; the last one has the rest.
extern "C" __global__ void __launch_bounds__(128)
    sphere_taps(const __grid_constant__ Arena arena, const __grid_constant__ SphereTaps args) {
    __shared__ float value[most_taps];
    __shared__ u32 band[most_taps], longitude[most_taps];
    const u32 spans = (args.columns + blockDim.x - 1) / blockDim.x, bundles = (args.channels + at_once - 1) / at_once;
    for (u64 item = blockIdx.x; item < u64(args.rows) * bundles * spans; item += gridDim.x) {
        const u32 span = u32(item % spans), channel = u32(item / spans % bundles) * at_once, row = u32(item / spans / bundles);
        const u32 q = span * blockDim.x + threadIdx.x;
        const u64 end = args.starts[row + 1];
        float sum[at_once] = {};
        for (u64 first = args.starts[row]; first < end; first += most_taps) {
            const u32 count = u32(min(end - first, u64(most_taps)));
            __syncthreads();
            for (u32 tap = threadIdx.x; tap < count; tap += blockDim.x) {
                const u64 at = args.places[first + tap];
                value[tap] = args.values[first + tap], band[tap] = u32(at / args.circle), longitude[tap] = u32(at % args.circle);
            }
            __syncthreads();
            for (u32 tap = 0; tap < count && q < args.columns; ++tap) {
                u32 turned = longitude[tap] + (args.first + q) * args.step;
                if (turned >= args.circle) turned -= args.circle;
                const u32 part = min(turned / args.part_columns, args.parts - 1), begin = part * args.part_columns;
                const u64 width = part + 1 < args.parts ? args.part_columns : args.circle - begin;
                const float* x = args.x + u64(begin) * args.channels * args.bands + band[tap] * width + turned - begin;
#pragma unroll
                for (u32 c = 0; c < at_once; ++c) {
                    if (channel + c < args.channels) sum[c] += value[tap] * x[(channel + c) * args.bands * width];
                }
            }
        }
        for (u32 c = 0; c < at_once && q < args.columns && channel + c < args.channels; ++c) {
            args.y[(u64(channel + c) * args.rows + row) * args.columns + q] = sum[c];
        }
    }
}
"""
SPHERE_TAPS = DeclaredKernel(
    "sphere_taps", TAPS, x=Pointer("const float*"), values=Pointer("const float*"), places=Pointer("const u64*"),
    starts=Pointer("const u64*"), y=Pointer("float*"), rows=U32, channels=U32, bands=U32, columns=U32, first=U32, step=U32, circle=U32,
    parts=U32, part_columns=U32,
)  # fmt: skip

SUM = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// Rows of this rank's latitudes, of all images, in rank order, and the bias. Terms lie in one of two buffers by the launch's parity:
// a rank that has finished a launch knows that all have finished the one before.
extern "C" __global__ void __launch_bounds__(512)
    latitude_sum(const __grid_constant__ Arena arena, const __grid_constant__ LatitudeSum args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u64 row_bytes = 4 * u64(args.columns), terms = args.terms + (epoch & 1) * WORLD_SIZE * args.stride;
    const auto at = [&](u32 q, u32 row) {  // where the row of rank q lies here
        return args.x + (u64(row / args.share[q]) * args.latitudes + q * args.share[0] + row % args.share[q]) * row_bytes;
    };
    for (int k = 1; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        char* target = arena.peer(q, terms + arena.rank * args.stride);
        each_row(args.images * args.share[q], [&](u32 row) { copy_bytes(Warp{}, target + row * row_bytes, at(q, row), row_bytes); });
    }
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);  // a row has the same block on every rank

    const u32 share = args.share[arena.rank];
    each_row(args.images * share, [&](u32 row) {
        const float bias = args.bias == nullptr ? 0.0f : args.bias[row / share % args.channels];
        each_column(args.columns, [&](u32 column) {
            float total[row_lanes], term[row_lanes];
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const char* source = q == arena.rank ? at(q, row) : arena.local(terms + q * args.stride) + row * row_bytes;
                RowOf<Float32>(source, 0, args.columns).load(column, term);
                for (int e = 0; e < row_lanes; ++e) total[e] = q == 0 ? term[e] : total[e] + term[e];
            }
            for (float& v : total) v += bias;
            RowOf<Float32>(args.y, row, args.columns).store(column, total);
        });
    });
}
"""
LATITUDE_SUM = DeclaredKernel(
    "latitude_sum", SUM, epochs=Epochs(), flags=Flags(), terms=Buffer(), x=Pointer("const char*"), bias=Pointer("const float*"),
    y=Pointer(), images=U32, channels=U32, latitudes=U32, columns=U32, stride=U64, share=array(U32, MAX_RANKS),
)  # fmt: skip


def shares(size: int, count: int) -> list[int]:
    """Returns how many of ``size`` items each rank has: ceil(size / count) but for the last; floor, if that left it none."""
    each = -(-size // count)
    if each * (count - 1) >= size:
        each = size // count
    return [each] * (count - 1) + [size - each * (count - 1)]


@per_group
def sphere_taps(group: Group, columns: int) -> BoundKernel:
    """Makes the launch of a rank's own work, bound by all ranks together: groups may have one rank."""
    return SPHERE_TAPS.bind(group, grid=16 * group.sm_count, block=min(128, group.max_threads, -(-columns // 32) * 32), sizes={})


@per_group
def latitude_sum(group: Group, images: int, channels: int, latitudes: int, columns: int) -> BoundKernel:
    share, grid = shares(latitudes, group.world_size), group.sm_count
    stride = -(-images * max(share) * columns * 4 // 16) * 16
    return LATITUDE_SUM.bind(
        group, grid=grid, block=min(512, group.max_threads), sizes={"flags": grid, "terms": 2 * group.world_size * stride},
        images=images, channels=channels, latitudes=latitudes, columns=columns, stride=stride,
        share=share + [0] * (MAX_RANKS - group.world_size),
    )  # fmt: skip


def gathered(group: Group, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Returns all ranks' parts, one behind the other."""
    if group.world_size == 1:
        return x.contiguous()
    parts = [x.shape[:3].numel() * width for width in widths]
    whole = x.new_empty(sum(parts))
    if min(widths) == max(widths):
        communicator(group).all_gather_into_tensor(whole, x.contiguous())
    else:
        sends = [(0, x.nbytes)] * group.world_size
        communicator(group).exchange(whole, x.contiguous(), sends, [(4 * q * parts[0], 4 * part) for q, part in enumerate(parts)])
    return whole


@torch.no_grad()
def solution(
    x: torch.Tensor,
    psi: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    nlon_out: int,
    nlon_in: int,
    azimuth_group: dist.ProcessGroup | None = None,
    polar_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    azimuth, polar, (batch, channels, bands, _), (taps, latitudes, _) = group_of(azimuth_group), group_of(polar_group), x.shape, psi.shape
    widths, column_shares = shares(nlon_in, azimuth.world_size), shares(nlon_out, azimuth.world_size)
    columns, filters, outputs = column_shares[azimuth.rank], taps * latitudes, weight.shape[0]
    indices = psi.indices()
    rows = torch.arange(filters + 1, device=x.device)
    starts = torch.searchsorted(indices[0] * latitudes + indices[1], rows)
    y = x.new_empty((batch, channels, filters, columns))
    sphere_taps(group_of(), max(column_shares))(
        x=gathered(azimuth, x, widths), values=psi.values(), places=indices[2].contiguous(), starts=starts, y=y, rows=filters,
        channels=batch * channels, bands=bands, columns=columns, first=column_shares[0] * azimuth.rank, step=nlon_in // nlon_out,
        circle=nlon_in, parts=len(widths) if widths[0] else 1, part_columns=widths[0] or nlon_in,
    )  # fmt: skip
    mixed = weight.reshape(groups, outputs // groups, -1) @ y.view(batch, groups, channels // groups * taps, latitudes * columns)
    mixed = mixed.view(batch, outputs, latitudes, columns)
    if polar.world_size == 1:
        return mixed if bias is None else mixed.add_(bias.view(-1, 1, 1))
    result = x.new_empty((batch, outputs, shares(latitudes, polar.world_size)[polar.rank], columns))
    latitude_sum(polar, batch * outputs, outputs, latitudes, columns)(x=mixed, bias=bias, y=result)
    return result
