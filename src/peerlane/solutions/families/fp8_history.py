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

// use(i, step): where the first of the caller's next eights of elements begins, and how far apart those are that it takes together. The
// same ones in a block of this number on every rank.
constexpr int together = 4;
template <class Use>
__device__ void each_eights(u64 elements, const Use& use) {
    const u64 step = u64(gridDim.x) * blockDim.x * row_lanes;
    for (u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * row_lanes; i < elements; i += together * step) use(i, step);
}

// These eights of a slice; zeros behind its end.
__device__ void load_eights(const char* slice, u64 elements, u64 i, u64 step, float (&value)[together][row_lanes]) {
    const u32 left = static_cast<u32>(min(elements - i, u64(0xfffffff8u)));
    const auto place = [&](int k, u32& row, u32& column) { row = 0, column = static_cast<u32>(min(k * step, u64(left))); };
    load_together<ELEMENT, together>(slice + i * bytes, left, place, value);
}

// Eight elements from `at` on; nothing behind the slice's end.
__device__ void store_eight(char* slice, u64 elements, u64 at, const float (&value)[row_lanes]) {
    RowOf<ELEMENT>(slice + at * bytes, 0, static_cast<u32>(min(elements - at, u64(row_lanes)))).store(0, value);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fp8_exchange(const __grid_constant__ Arena arena, const __grid_constant__ Fp8Exchange args) {
    __shared__ Largest scratch[32], of_rank[WORLD_SIZE];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const auto larger = [](Largest a, Largest b) { return Largest{max(a.value, b.value), max(a.history, b.history)}; };
    constexpr int slices = SCATTER ? WORLD_SIZE : 1;
    const u64 n = args.slice;

    Largest own{};
    each_eights(slices * n, [&](u64 i, u64 step) {
        float value[together][row_lanes];
        load_eights(args.flat, slices * n, i, step, value);
        for (const auto& eight : value) {
            for (float v : eight) own.value = max(own.value, magnitude(v));
        }
    });
    if (blockIdx.x == 0) {
        for (u32 h = 1 + threadIdx.x; h < args.entries; h += blockDim.x) {
            const float entry = element_of<HISTORY>(args.history, h);
            if (!(entry < 0.0f)) own.history = max(own.history, magnitude(entry));
            set_element<HISTORY>(args.new_history, h - 1, entry);
        }
    }
    own = block_reduce(own, larger, scratch);
    grid_send<WORLD_SIZE>(arena, args.largest, epoch, own);
    grid_receive(arena, args.largest, epoch, 0, 1, Largest{}, larger, of_rank);  // the other ranks' only where codes are decoded
    const auto scale_of = [&](int q) {  // in float32, from the new history as it is stored
        float newest[row_lanes] = {__uint_as_float(of_rank[q].value)};
        round_as<HISTORY>(newest);
        const float largest = __uint_as_float(max(magnitude(newest[0]), of_rank[q].history));
        return (largest < 1e-12f ? 1e-12f : largest) / 448.0f;
    };
    const float amax = __uint_as_float(of_rank[arena.rank].value);
    if (blockIdx.x == 0 && threadIdx.x == 0) set_element<HISTORY>(args.new_history, args.entries - 1, amax);

    const float scale = scale_of(arena.rank), inverse = 1.0f / scale;
    const u64 stride = (n + 15) / 16 * 16, codes = args.codes + (epoch & 1) * WORLD_SIZE * stride;
    each_eights(n, [&](u64 i, u64 step) {  // slices by turns, so that links are busy all the time
        for (int s = 0; s < slices; ++s) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, s);
            float value[together][row_lanes];
            load_eights(args.flat + (SCATTER ? q : 0) * n * bytes, n, i, step, value);
#pragma unroll
            for (int e = 0; e < together; ++e) {
                const u64 at = i + e * step;
                if (at >= n) break;
                for (float& v : value[e]) v = quotient(v, scale, inverse);
                for (int k = !SCATTER; k < WORLD_SIZE / slices; ++k) {
                    char* target = arena.peer(rank_after<WORLD_SIZE>(q, k), codes + arena.rank * stride + at);
                    RowOf<Float8E4M3>(target, 0, row_lanes).store(0, value[e]);
                }
                if (SCATTER) continue;
                round_as<Float8E4M3>(value[e]);
                for (float& v : value[e]) v *= scale;
                store_eight(args.out + arena.rank * n * bytes, n, at, value[e]);
            }
        }
    });
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);
    grid_receive(arena, args.largest, epoch, 1, WORLD_SIZE, Largest{}, larger, of_rank);

    each_eights(n, [&](u64 i, u64 step) {
        float sum[together][row_lanes] = {};
        for (int q = 0; q < WORLD_SIZE; ++q) {
            if (!SCATTER && q == arena.rank) continue;
            const float of_source = scale_of(q);
            u64 code[together];
#pragma unroll
            for (int e = 0; e < together; ++e) {
                if (i + e * step < n) code[e] = *reinterpret_cast<const u64*>(arena.local(codes + q * stride + i + e * step));
            }
#pragma unroll
            for (int e = 0; e < together; ++e) {
                const u64 at = i + e * step;
                if (at >= n) break;
                float value[row_lanes];
                Float8E4M3::widen(static_cast<u32>(code[e]), value), Float8E4M3::widen(static_cast<u32>(code[e] >> 32), value + 4);
                for (float& v : value) v *= of_source;
                if (SCATTER) {
                    round_as<ELEMENT>(value);
                    for (int l = 0; l < row_lanes; ++l) sum[e][l] += value[l];
                } else {
                    store_eight(args.out + q * n * bytes, n, at, value);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < together; ++e) {
            const u64 at = i + e * step;
            if (at >= n || !SCATTER) break;
            for (float& v : sum[e]) v /= WORLD_SIZE;
            store_eight(args.out, n, at, sum[e]);
        }
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
