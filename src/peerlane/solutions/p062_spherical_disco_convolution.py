"""Problem 62, a convolution on the sphere over a grid of ranks: what filters reach is sent, a kernel applies them, one sums latitudes.

Each rank makes its own longitudes of the output alone. So channels are mixed before latitudes are summed: ranks exchange outputs, not the
filters' responses, which are K C / C_out times as many. ``families/sphere_exchange.py`` fetches the longitudes that filters reach;
``families/sphere_taps.py`` has the kernel of taps, and ``families/sphere_mixing.py`` that of channels, where they are many. Bound by the
multiplications of taps in float32, and in the depthwise form by loads from L1, one for each tap, channel and output."""

import torch
import torch.distributed as dist

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, array, group_of, per_group
from peerlane.device.host.group import MAX_RANKS
from peerlane.solutions.families.sphere_exchange import ArcExchange, arc_exchange, shares
from peerlane.solutions.families.sphere_mixing import Mixing
from peerlane.solutions.families.sphere_taps import Taps, convolve

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


@per_group
def latitude_sum(group: Group, images: int, channels: int, latitudes: int, columns: int) -> BoundKernel:
    share, grid = shares(latitudes, group.world_size), group.sm_count
    stride = -(-images * max(share) * columns * 4 // 16) * 16
    return LATITUDE_SUM.bind(
        group, grid=grid, block=min(512, group.max_threads), sizes={"flags": grid, "terms": 2 * group.world_size * stride},
        images=images, channels=channels, latitudes=latitudes, columns=columns, stride=stride,
        share=share + [0] * (MAX_RANKS - group.world_size),
    )  # fmt: skip


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
    azimuth, polar, outputs, latitudes = group_of(azimuth_group), group_of(polar_group), weight.shape[0], psi.shape[1]
    indices = psi.indices()
    rows = torch.arange(psi.shape[0] * latitudes + 1, device=x.device)
    taps = Taps(
        indices[2].contiguous(), psi.values(), torch.searchsorted(indices[0] * latitudes + indices[1], rows), psi.shape[0], latitudes
    )
    exchange: ArcExchange = arc_exchange(azimuth, tuple(x.shape), nlon_in, nlon_out)
    alone = polar.world_size == 1
    mixed = convolve(group_of(), exchange, x.contiguous(), taps, Mixing(weight.contiguous(), groups, bias if alone else None))
    if alone:
        return mixed
    columns = mixed.shape[3]
    result = x.new_empty((x.shape[0], outputs, shares(latitudes, polar.world_size)[polar.rank], columns))
    latitude_sum(polar, x.shape[0] * outputs, outputs, latitudes, columns)(x=mixed, bias=bias, y=result)
    return result
