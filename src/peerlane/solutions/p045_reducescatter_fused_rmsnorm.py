"""Problem 45, reduce-scatter of rows and RMSNorm: one kernel sends rows to their owners, who sum and normalise them as they lie.

Bound by the links: (W - 1) / W of the input leaves every rank. The owner's sums are float32, in rank order, and rounded with the result.
Rows lie in one of two buffers by the launch's parity: a rank that has finished a launch has had a signal of it from every other rank, so
all of them have finished the launch before."""

import torch

from peerlane.device import (
    F32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    element_type,
    group_of,
    per_group,
)

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    reduce_norm(const __grid_constant__ Arena arena, const __grid_constant__ ReduceNorm args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u64 row_bytes = u64(args.columns) * (4 / ELEMENT::lanes), terms = args.terms + (epoch & 1) * WORLD_SIZE * args.stride;
    for (int k = 1; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        char* target = arena.peer(q, terms + arena.rank * args.stride);
        each_row(args.rows, [&](u32 row) {
            copy_bytes(Warp{}, target + row * row_bytes, args.x + (u64(q) * args.rows + row) * row_bytes, row_bytes);
        });
    }
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);  // a row has the same block on every rank

    each_row(args.rows, [&](u32 row) {
        const auto mean = [&](u32 column, float (&total)[row_lanes]) {
            for (int q = 0; q < WORLD_SIZE; ++q) {
                float value[row_lanes];
                const char* rows = q == arena.rank ? args.x + q * args.rows * row_bytes : arena.local(terms + q * args.stride);
                RowOf<ELEMENT>(rows, row, args.columns).load(column, value);
                for (int e = 0; e < row_lanes; ++e) total[e] = q == 0 ? value[e] : total[e] + value[e];
            }
            for (float& v : total) v /= WORLD_SIZE;
        };
        float sum = 0.0f, value[row_lanes], gain[row_lanes];
        each_column(args.columns, [&](u32 column) {
            mean(column, value);
            for (float v : value) sum += v * v;
        });
        const float factor = rsqrtf(warp_sum(sum) / args.columns + args.eps);
        each_column(args.columns, [&](u32 column) {
            mean(column, value);
            RowOf<GAIN>(args.gamma, 0, args.columns).load(column, gain);
            for (int e = 0; e < row_lanes; ++e) value[e] *= factor * gain[e];
            RowOf<ELEMENT>(args.out, row, args.columns).store(column, value);
        });
    });
}
"""
REDUCE_NORM = DeclaredKernel(
    "reduce_norm", SOURCE, epochs=Epochs(), flags=Flags(), terms=Buffer(), x=Pointer("const char*"), gamma=Pointer("const char*"),
    out=Pointer(), rows=U32, columns=U32, stride=U64, eps=F32,
)  # fmt: skip


@per_group
def reduce_norm(group: Group, rows: int, columns: int, dtype: torch.dtype, gain: torch.dtype) -> BoundKernel:
    grid, stride = min(group.sm_count, rows), -(-rows * columns * dtype.itemsize // 16) * 16
    return REDUCE_NORM.bind(
        group,
        grid=grid,
        block=min(512, group.max_threads),
        defines={"ELEMENT": element_type(dtype), "GAIN": element_type(gain)},
        sizes={"flags": grid, "terms": 2 * group.world_size * stride},
        rows=rows,
        columns=columns,
        stride=stride,
    )


def solution(rs_input_1d: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    ranks, columns = group_of(), gamma.numel()
    rows = rs_input_1d.numel() // ranks.world_size // columns
    out = rs_input_1d.new_empty((rows, columns))
    if rows:
        launch = reduce_norm(ranks, rows, columns, rs_input_1d.dtype, gamma.dtype)
        launch(x=rs_input_1d.contiguous(), gamma=gamma.contiguous(), out=out, eps=eps)
    return out
