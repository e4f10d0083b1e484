"""Problem 9, gradients of LayerNorm's gain and bias: one kernel, both column sums in one pass, one packet for each column and peer.

Blocks, two on an SM, take stripes of 256 columns and groups of rows, a lane four rows of both inputs at a time; the last block of a stripe
adds the groups' sums and exchanges them. Bound by HBM, which reads both inputs once. The public shape is bound by the launch and one trip
of the packets."""

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, group_of, per_group
from peerlane.device.host.declare import MAX_EPOCH_BLOCKS

SOURCE = r"""
#include <peerlane/grid.cuh>
using namespace peerlane;

struct Gradients {
    float gamma, beta;
};
__device__ Gradients add(Gradients a, Gradients b) { return {a.gamma + b.gamma, a.beta + b.beta}; }
constexpr u32 stripe = row_lanes * warp_threads, most_warps = 16, of_lane = warp_threads + 1;  // apart in shared memory's banks
constexpr int at_once = X_TYPE::lanes < Y_TYPE::lanes ? X_TYPE::lanes : Y_TYPE::lanes;

extern "C" __global__ void __launch_bounds__(512, 2)
    layernorm_backward(const __grid_constant__ Arena arena, const __grid_constant__ LayernormBackward args) {
    __shared__ Gradients of_warp[most_warps][row_lanes * of_lane];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u32 groups = args.row_groups, group = blockIdx.x % groups, warps = blockDim.x / warp_threads, warp = threadIdx.x / warp_threads;
    const u32 lane = Warp{}.thread(), step = groups * warps;
    const auto gather = [&](const Gradients (&sum)[row_lanes]) {
        __syncthreads();
        for (int e = 0; e < row_lanes; ++e) of_warp[warp][e * of_lane + lane] = sum[e];
        __syncthreads();
    };
    const auto total_of = [&](u32 c) {
        const u32 at = c % row_lanes * of_lane + c / row_lanes;
        Gradients total = of_warp[0][at];
        for (u32 w = 1; w < warps; ++w) total = add(total, of_warp[w][at]);
        return total;
    };
    // All ranks' blocks go through their stripes in one order, so that no block waits for one that waits for it.
    for (u32 s = blockIdx.x / groups; s * stripe < args.columns; s += gridDim.x / groups) {
        Gradients sum[row_lanes] = {};
        for (u32 first = group * warps + warp; first < args.rows; first += at_once * step) {
            const auto place = [&](int i, u32& row, u32& column) {
                row = first + i * step;
                column = row < args.rows ? s * stripe + lane * row_lanes : args.columns;
            };
            u32 x_words[at_once][row_lanes / X_TYPE::lanes], dy_words[at_once][row_lanes / Y_TYPE::lanes];
            load_words_together<X_TYPE>(args.x, args.columns, place, x_words);
            load_words_together<Y_TYPE>(args.dy, args.columns, place, dy_words);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                float x[row_lanes], dy[row_lanes];
                widen_words<X_TYPE>(x_words[i], x);
                widen_words<Y_TYPE>(dy_words[i], dy);
#pragma unroll
                for (int e = 0; e < row_lanes; ++e) sum[e] = add(sum[e], {x[e] * dy[e], dy[e]});
            }
        }
        gather(sum);
        Gradients* const partial = reinterpret_cast<Gradients*>(arena.local(args.partial)) + u64(s) * groups * stripe;
        for (u32 c = threadIdx.x; c < stripe; c += blockDim.x) partial[group * stripe + c] = total_of(c);
        if (!last_block(reinterpret_cast<u32*>(arena.local(args.arrived)) + s, groups)) continue;
        Gradients all[row_lanes] = {};
        for (u32 g = warp; g < groups; g += warps) {
            for (int e = 0; e < row_lanes; ++e) all[e] = add(all[e], partial[g * stripe + lane * row_lanes + e]);
        }
        gather(all);
        const SmallExchange<WORLD_SIZE, Gradients> exchange(arena, args.sums, epoch);
        const u32 count = min(stripe, args.columns - s * stripe);
        for (u32 c = threadIdx.x; c < count; c += blockDim.x) exchange.send(s * stripe + c, total_of(c));
        for (u32 c = threadIdx.x; c < count; c += blockDim.x) {
            const Gradients total = exchange.receive(s * stripe + c, total_of(c), add);
            set_element<GAMMA_TYPE>(args.gamma, s * stripe + c, total.gamma);
            set_element<Y_TYPE>(args.beta, s * stripe + c, total.beta);
        }
    }
}
"""
LAYERNORM_BACKWARD = DeclaredKernel(
    "layernorm_backward", SOURCE, epochs=Epochs(), sums=Packets(), partial=Buffer(), arrived=Buffer(), x=Pointer("const char*"),
    dy=Pointer("const char*"), gamma=Pointer(), beta=Pointer(), rows=U32, columns=U32, row_groups=U32,
)  # fmt: skip
STRIPE = 256


@per_group
def layernorm_backward(group: Group, columns: int, x: torch.dtype, dy: torch.dtype) -> BoundKernel:
    stripes = -(-columns // STRIPE)
    groups = max(1, min(2 * group.sm_count, MAX_EPOCH_BLOCKS) // stripes)
    types = {"X_TYPE": x, "Y_TYPE": dy, "GAMMA_TYPE": torch.promote_types(x, dy)}
    return LAYERNORM_BACKWARD.bind(
        group,
        grid=groups * min(stripes, group.sm_count),
        block=min(512, group.max_threads),
        defines={name: element_type(dtype) for name, dtype in types.items()},
        sizes={"sums": columns, "partial": stripes * groups * STRIPE * 8, "arrived": 4 * stripes},
        columns=columns,
        row_groups=groups,
    )


def solution(X_hat: torch.Tensor, dY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = X_hat.shape[-1]
    gamma = torch.empty(columns, dtype=torch.promote_types(X_hat.dtype, dY.dtype), device=dY.device)
    beta = torch.empty(columns, dtype=dY.dtype, device=dY.device)
    launch = layernorm_backward(group_of(), columns, X_hat.dtype, dY.dtype)
    launch(x=X_hat.contiguous(), dy=dY.contiguous(), gamma=gamma, beta=beta, rows=X_hat.shape[0])
    return gamma, beta
