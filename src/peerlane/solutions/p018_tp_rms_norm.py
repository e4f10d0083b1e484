"""Problem 18, RMSNorm over a sharded hidden dimension: one kernel, a warp for each row, one packet for each row and peer.

A warp holds its row, or several short ones, in registers: it pushes their sums of squares, and scales them as other ranks' sums come in.
Rows that are too long, or begin at odd addresses, are read three times, behind all sums' pushes. Bound by HBM, which reads and writes each
row once."""

import torch

from peerlane.device import F32, U32, BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512) rms_norm(const __grid_constant__ Arena arena, const __grid_constant__ RmsNorm args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const SmallExchange<WORLD_SIZE, float> sums(arena, args.sums, epoch);
    const auto square_sum = [&](u32 row) {
        float sum = 0, value[row_lanes];
        each_column(args.columns, [&](u32 column) {
            RowOf<X_TYPE>(args.x, row, args.columns).load(column, value);
            for (float v : value) sum += v * v;
        });
        return warp_sum(sum);
    };
    const auto factor_of = [&](u32 row, float own) {
        return rsqrtf(sums.pull(row, own, [](float a, float b) { return a + b; }) / args.width + args.epsilon);
    };
    const auto scale = [](float (&value)[row_lanes], float factor, const float (&gain)[row_lanes]) {
        for (float& v : value) v *= factor;
        round_as<X_TYPE>(value);
        for (int e = 0; e < row_lanes; ++e) value[e] *= gain[e];
    };
    if (VECTORS > 0 && aligned_for<Vec16>(args.x) && aligned_for<Vec16>(args.weight) && aligned_for<Vec16>(args.y)) {
        constexpr int vectors = VECTORS > 0 ? VECTORS : 1;
        const u32 step = gridDim.x * (blockDim.x / warp_threads), lane = Warp{}.thread();
        const auto column_of = [&](int v) { return (v * warp_threads + lane) * row_lanes; };
        for (u32 first = threadIdx.x / warp_threads * gridDim.x + blockIdx.x; first < args.rows; first += TOGETHER * step) {
            u32 held[TOGETHER * vectors][row_lanes / X_TYPE::lanes];
            const auto place = [&](int i, u32& row, u32& column) {
                row = first + i / vectors * step;
                column = row < args.rows ? column_of(i % vectors) : args.columns;
            };
            load_words_together<X_TYPE>(args.x, args.columns, place, held);
            float own[TOGETHER], value[row_lanes], gain[row_lanes];
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r) {
                own[r] = 0.0f;
#pragma unroll
                for (int v = 0; v < vectors; ++v) {
                    widen_words<X_TYPE>(held[r * vectors + v], value);
                    for (float one : value) own[r] += one * one;
                }
                own[r] = warp_sum(own[r]);
                if (first + r * step < args.rows) sums.push(first + r * step, own[r]);
            }
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r) {
                const u32 row = first + r * step;
                if (row >= args.rows) break;
                const float factor = factor_of(row, own[r]);
#pragma unroll
                for (int v = 0; v < vectors; ++v) {
                    if (column_of(v) >= args.columns) continue;
                    u32 words[row_lanes / Y_TYPE::lanes], gains[row_lanes / WEIGHT_TYPE::lanes];
                    load_vectors(args.weight + column_of(v) * (4 / WEIGHT_TYPE::lanes), gains);
                    widen_words<WEIGHT_TYPE>(gains, gain);
                    widen_words<X_TYPE>(held[r * vectors + v], value);
                    scale(value, factor, gain);
                    for (int w = 0; w < row_lanes / Y_TYPE::lanes; ++w) words[w] = Y_TYPE::narrow(value + w * Y_TYPE::lanes);
                    store_vectors(args.y + (u64(row) * args.columns + column_of(v)) * (4 / Y_TYPE::lanes), words);
                }
            }
        }
        return;
    }
    each_row(args.rows, [&](u32 row) { sums.push(row, square_sum(row)); });
    each_row(args.rows, [&](u32 row) {
        const float factor = factor_of(row, square_sum(row));
        each_column(args.columns, [&](u32 column) {
            float value[row_lanes], gain[row_lanes];
            RowOf<X_TYPE>(args.x, row, args.columns).load(column, value);
            RowOf<WEIGHT_TYPE>(args.weight, 0, args.columns).load(column, gain);
            scale(value, factor, gain);
            RowOf<Y_TYPE>(args.y, row, args.columns).store(column, value);
        });
    });
}
"""
RMS_NORM = DeclaredKernel(
    "rms_norm", SOURCE, epochs=Epochs(), sums=Packets(), x=Pointer("const char*"), weight=Pointer("const char*"), y=Pointer(),
    rows=U32, columns=U32, width=F32, epsilon=F32,
)  # fmt: skip
THREADS, ROW_LANES, WARP_THREADS = 512, 8, 32
HELD_WORDS = 64
"""Registers of a thread that hold rows."""


@per_group
def rms_norm(group: Group, rows: int, columns: int, x: torch.dtype, weight: torch.dtype) -> BoundKernel:
    types = {"X_TYPE": x, "WEIGHT_TYPE": weight, "Y_TYPE": torch.promote_types(x, weight)}
    grid, vectors = min(group.sm_count, rows), -(-columns // (ROW_LANES * WARP_THREADS))
    fitting = HELD_WORDS // (vectors * ROW_LANES * x.itemsize // 4) if columns % ROW_LANES == 0 else 0
    together = min(fitting, -(-rows // (grid * THREADS // WARP_THREADS)))
    return RMS_NORM.bind(
        group,
        grid=grid,
        block=THREADS,
        defines={
            **{name: element_type(dtype) for name, dtype in types.items()},
            "VECTORS": vectors if together else 0,
            "TOGETHER": max(together, 1),
        },
        sizes={"sums": rows},
        rows=rows,
        columns=columns,
        width=columns * group.world_size,
    )


def solution(local_hidden_states: torch.Tensor, local_weight: torch.Tensor, variance_epsilon: float) -> torch.Tensor:
    x, weight = local_hidden_states.contiguous(), local_weight.contiguous()
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    if x.numel():
        launch = rms_norm(group_of(), x.numel() // x.shape[-1], x.shape[-1], x.dtype, weight.dtype)
        launch(x=x, weight=weight, y=y, epsilon=variance_epsilon)
    return y
