"""Problem 80, Sinkhorn-Knopp by scaling vectors: exponentials E of the logits are never stored, each pass makes them anew.

The assignment is diag(u) E diag(v): an iteration takes v = 1 / (K sum over all ranks of E^T u) and u = 1 / (n E v), so the total mass
cancels. The number of samples travels with the first sum. Bound by HBM, which reads the logits twice an iteration and once more, and writes
the result once. The reference passes about twenty times over exponentials in float32. Sums have a fixed order."""

import math

import torch
import torch.distributed as dist

from peerlane.device import F32, U32, BoundKernel, Group, LocalKernel, Pointer, communicator, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 together = 4, strip = row_lanes * warp_threads, warps = THREADS / warp_threads;
constexpr int of_columns = 0, of_rows = 1, result = 2;

extern "C" __global__ void __launch_bounds__(THREADS) sinkhorn(const __grid_constant__ Sinkhorn args) {
    const u32 rows = args.rows, columns = args.columns;
    float logit[together][row_lanes];
    const auto load = [&](u32 row, u32 column) {  // some rows from this one on; the last one stands for those behind the end
        const auto place = [&](int i, u32& at, u32& first) { at = min(row + i, rows - 1), first = column; };
        load_together<ELEMENT>(args.logits, columns, place, logit);
    };
    const auto mass = [&](int i, int e) { return exp2f(logit[i][e] * args.scale); };

    if constexpr (PASS == of_columns) {  // sums[split][column]: of a part of the rows, times u
        __shared__ float of_warps[warps][strip];
        const u32 strips = (columns + strip - 1) / strip, warp = threadIdx.x / warp_threads;
        const u32 column = blockIdx.x % strips * strip + Warp{}.thread() * row_lanes;
        const Part part = part_of(rows, blockIdx.x / strips, gridDim.x / strips);
        float sum[row_lanes] = {};
        for (u32 row = u32(part.first) + warp * together; row < part.end; row += warps * together) {
            load(row, column);
#pragma unroll
            for (u32 i = 0; i < together; ++i) {
                const float weight = row + i >= part.end ? 0.0f : args.u == nullptr ? 1.0f : args.u[row + i];
                for (int e = 0; e < row_lanes; ++e) sum[e] += weight * mass(i, e);
            }
        }
        for (int e = 0; e < row_lanes; ++e) of_warps[warp][Warp{}.thread() * row_lanes + e] = sum[e];
        __syncthreads();
        for (u32 c = threadIdx.x; c < strip; c += THREADS) {
            float total = 0;
            for (u32 w = 0; w < warps; ++w) total += of_warps[w][c];
            const u32 to = blockIdx.x % strips * strip + c;
            if (to < columns) args.out[u64(blockIdx.x / strips) * columns + to] = total;
        }
    } else {
        __shared__ float scratch[32];
        const float samples = *args.samples;
        for (u32 row = blockIdx.x * together; row < rows; row += gridDim.x * together) {
            float sum[together] = {}, factor[together];
            if constexpr (PASS == result) {
                for (u32 i = 0; i < together; ++i) factor[i] = args.u[min(row + i, rows - 1)] * samples;
            }
            for (u32 column = threadIdx.x * row_lanes; column < columns; column += THREADS * row_lanes) {
                float v[row_lanes];
                RowOf<Float32>(reinterpret_cast<const char*>(args.sums), 0, columns).load(column, v);
                for (int e = 0; e < row_lanes; ++e) v[e] = column + e < columns ? 1.0f / (v[e] * columns) : 0.0f;
                load(row, column);
#pragma unroll
                for (u32 i = 0; i < together; ++i) {
                    float value[row_lanes];
                    for (int e = 0; e < row_lanes; ++e) value[e] = mass(i, e) * v[e];
                    if constexpr (PASS == of_rows) {
                        for (int e = 0; e < row_lanes; ++e) sum[i] += value[e];
                    } else if (row + i < rows) {
                        for (int e = 0; e < row_lanes; ++e) value[e] *= factor[i];
                        RowOf<Float32>(reinterpret_cast<const char*>(args.out), row + i, columns).store(column, value);
                    }
                }
            }
            if constexpr (PASS == of_rows) {  // u of these rows
#pragma unroll
                for (u32 i = 0; i < together; ++i) {
                    const float total = block_reduce(sum[i], [](float a, float b) { return a + b; }, scratch);
                    if (threadIdx.x == 0 && row + i < rows) args.out[row + i] = 1.0f / (total * samples);
                }
            }
        }
    }
}
"""
SINKHORN = LocalKernel(
    "sinkhorn", SOURCE, logits=Pointer("const char*"), u=Pointer("const float*"), sums=Pointer("const float*"),
    samples=Pointer("const float*"), out=Pointer("float*"), rows=U32, columns=U32, scale=F32,
)  # fmt: skip
STRIP, ROWS = 256, 4
"""Columns of a block that adds up columns, and rows that are taken together."""
OF_COLUMNS, OF_ROWS, RESULT = range(3)


@per_group
def sinkhorn(group: Group, rows: int, columns: int, dtype: torch.dtype, part: int) -> tuple[BoundKernel, int]:
    """Returns the launch of a pass, and the parts of the rows whose sums of columns lie apart."""
    strips, splits = -(-columns // STRIP), 1
    if part == OF_COLUMNS:
        splits = max(1, min(rows // 64, 2 * group.sm_count // strips))
    threads = min(512, group.max_threads)
    bound = SINKHORN.bind(
        group, grid=strips * splits if part == OF_COLUMNS else max(1, min(4 * group.sm_count, -(-rows // ROWS))), block=threads,
        defines={"ELEMENT": element_type(dtype), "THREADS": threads, "PASS": part}, rows=rows, columns=columns,
    )  # fmt: skip
    return bound, splits


def solution(
    teacher_output: torch.Tensor,
    teacher_temp: float,
    n_masked_patches_tensor: torch.Tensor,
    n_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    kit, ranks, (rows, prototypes) = communicator(group), group_of(group), teacher_output.shape
    logits, scale = teacher_output.contiguous(), math.log2(math.e) / teacher_temp

    def of_columns(u: torch.Tensor | None) -> torch.Tensor:
        launch, splits = sinkhorn(ranks, rows, prototypes, logits.dtype, OF_COLUMNS)
        parts = sums.new_empty((splits, prototypes))
        launch(logits=logits, u=u, sums=None, samples=None, out=parts, scale=scale)
        return parts.sum(0) if splits > 1 else parts[0]

    def of_all(part: int, u: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        launch, _ = sinkhorn(ranks, rows, prototypes, logits.dtype, part)
        launch(logits=logits, u=u, sums=v, samples=samples, out=out, scale=scale)
        return out

    sums = torch.empty(prototypes + 1, dtype=torch.float32, device=logits.device)
    sums[prototypes:].copy_(n_masked_patches_tensor)  # exact below 2^24
    sums[:prototypes] = of_columns(None)
    kit.all_reduce(sums)
    samples, v = sums[prototypes:].clone(), sums[:prototypes]
    if n_iterations == 0:
        return torch.exp2(logits.to(torch.float32) * scale).mul_(samples / v.sum())
    u = sums.new_empty(rows)
    for iteration in range(n_iterations):
        if iteration:
            v = of_columns(u)
            kit.all_reduce(v)
        of_all(OF_ROWS, None, u)
    return of_all(RESULT, u, sums.new_empty((rows, prototypes)))
