"""Vectors that travel as e4m3 codes with one scale for each rank, made of an amax history (problems 52 and 53).

One kernel: every block finds the largest value of its part, a packet of each block makes all ranks' scales known everywhere, codes go to
their readers, and readers decode. Codes lie in one of two buffers, by the launch's parity. A rank that has finished a launch has had
signals of it from every other rank, so all of them have finished the launch before.
"""

import math

import torch

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Packets, Pointer, element_type, per_group
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/grid.cuh>
using namespace peerlane;

// Bits of absolute values: their order is that of the numbers, with NaN above infinity.
struct Largest {
    u32 value, history;
};
constexpr int bytes = 4 / ELEMENT::lanes;
__device__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// use(i, count): eight elements of a slice from i on, of which `count` are there. The same ones in a block of this number on every rank.
template <class Use>
__device__ void each_eight(u64 elements, const Use& use) {
    const u64 step = u64(gridDim.x) * blockDim.x * row_lanes;
    for (u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * row_lanes; i < elements; i += step) {
        use(i, u32(min(elements - i, u64(row_lanes))));
    }
}

extern "C" __global__ void __launch_bounds__(512)
    fp8_exchange(const __grid_constant__ Arena arena, const __grid_constant__ Fp8Exchange args) {
    __shared__ Largest scratch[32], of_rank[WORLD_SIZE];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const auto larger = [](Largest a, Largest b) { return Largest{max(a.value, b.value), max(a.history, b.history)}; };
    constexpr int slices = SCATTER ? WORLD_SIZE : 1;
    const u64 n = args.slice;

    Largest own{};
    for (int s = 0; s < slices; ++s) {
        each_eight(n, [&](u64 i, u32 count) {
            float value[row_lanes];
            RowOf<ELEMENT>(args.flat + (s * n + i) * bytes, 0, count).load(0, value);
            for (float v : value) own.value = max(own.value, magnitude(v));
        });
    }
    if (blockIdx.x == 0) {
        for (u32 h = 1 + threadIdx.x; h < args.entries; h += blockDim.x) {
            const float entry = element_of<HISTORY>(args.history, h);
            if (!(entry < 0.0f)) own.history = max(own.history, magnitude(entry));
            set_element<HISTORY>(args.new_history, h - 1, entry);
        }
    }
    own = block_reduce(own, larger, scratch);
    grid_reduce(arena, args.largest, epoch, own, Largest{}, larger, of_rank);
    const auto scale_of = [&](int q) {  // in float32, from the new history as it is stored
        float newest[row_lanes] = {__uint_as_float(of_rank[q].value)};
        round_as<HISTORY>(newest);
        const float largest = __uint_as_float(max(magnitude(newest[0]), of_rank[q].history));
        return (largest < 1e-12f ? 1e-12f : largest) / 448.0f;
    };
    const float amax = __uint_as_float(of_rank[arena.rank].value);
    if (blockIdx.x == 0 && threadIdx.x == 0) set_element<HISTORY>(args.new_history, args.entries - 1, amax);

    const float scale = scale_of(arena.rank);
    const u64 stride = (n + 15) / 16 * 16, codes = args.codes + (epoch & 1) * WORLD_SIZE * stride;
    for (int s = 0; s < slices; ++s) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, s);
        each_eight(n, [&](u64 i, u32 count) {
            float value[row_lanes];
            RowOf<ELEMENT>(args.flat + ((SCATTER ? q : 0) * n + i) * bytes, 0, count).load(0, value);
            for (float& v : value) v /= scale;
            for (int k = 0; k < WORLD_SIZE / slices; ++k) {
                char* target = arena.peer(rank_after<WORLD_SIZE>(q, k), codes + arena.rank * stride + i);
                RowOf<Float8E4M3>(target, 0, row_lanes).store(0, value);
            }
        });
    }
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);

    each_eight(n, [&](u64 i, u32 count) {
        float sum[row_lanes] = {};
        for (int q = 0; q < WORLD_SIZE; ++q) {
            const float of_source = scale_of(q);
            float value[row_lanes];
            RowOf<Float8E4M3>(arena.local(codes + q * stride + i), 0, row_lanes).load(0, value);
            for (float& v : value) v *= of_source;
            if (SCATTER) {
                round_as<ELEMENT>(value);
                for (int e = 0; e < row_lanes; ++e) sum[e] += value[e];
            } else {
                RowOf<ELEMENT>(args.out + (q * n + i) * bytes, 0, count).store(0, value);
            }
        }
        for (float& v : sum) v /= WORLD_SIZE;
        if (SCATTER) RowOf<ELEMENT>(args.out + i * bytes, 0, count).store(0, sum);
    });
}
"""
FP8_EXCHANGE = DeclaredKernel(
    "fp8_exchange", SOURCE, epochs=Epochs(), largest=Packets(), flags=Flags(), codes=Buffer(), flat=Pointer("const char*"),
    history=Pointer("const char*"), new_history=Pointer(), out=Pointer(), slice=U64, entries=U32,
)  # fmt: skip
THREADS = 512


@per_group
def _bound(group: Group, elements: int, dtype: torch.dtype, history: torch.dtype, scatter: bool) -> BoundKernel:
    block = min(THREADS, group.max_threads)
    grid = max(1, min(group.sm_count, math.ceil(elements / (8 * block))))
    stride = -(-elements // 16) * 16
    return FP8_EXCHANGE.bind(
        group,
        grid=grid,
        block=block,
        defines={"ELEMENT": element_type(dtype), "HISTORY": element_type(history), "SCATTER": int(scatter)},
        sizes={"largest": grid, "flags": grid, "codes": 2 * group.world_size * stride},
        slice=elements,
    )


def exchange_as_fp8(group: Group, flat: torch.Tensor, history: torch.Tensor, *, scatter: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: returns all ranks' vectors behind each other, or with ``scatter`` the mean of slice r of all; after the round trip
    through e4m3.

    The second result is the rank's history with its new amax. All ranks pass one length; histories have at least one entry."""
    if scatter and flat.numel() % group.world_size:
        raise UsageError(f"{flat.numel()} elements do not make {group.world_size} equal slices; pad the vector")
    elements = flat.numel() // group.world_size if scatter else flat.numel()
    out = flat.new_empty(elements if scatter else group.world_size * elements)
    updated = torch.empty_like(history)
    launch = _bound(group, elements, flat.dtype, history.dtype, scatter)
    launch(flat=flat.contiguous(), history=history.contiguous(), new_history=updated, out=out, entries=history.numel())
    return out, updated
