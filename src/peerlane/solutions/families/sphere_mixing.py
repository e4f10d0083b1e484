"""Channels mixed as in float32, by the matrix units of Hopper: each number is three of bfloat16, and six of their nine products count.

    mix(group, responses, Mixing(weight, groups, bias), y, first)

A block takes 128 outputs and 128 points. It cuts weights and responses into parts as they come in, while the units multiply what came
before. The products that are small have a sum of their own, for the units cut off what they add to a large one. Bound by the units, or
by HBM."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from peerlane.device import U32, BoundKernel, Group, LocalKernel, Pointer, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
#include <peerlane/tile.cuh>
using namespace peerlane;

constexpr u32 side = 128, depth = panel_columns, threads = 256;

// Parts of `depth` terms of 128 outputs and 128 points, the largest first.
struct Stage {
    Operand<BFloat16, side, Major::k> weight[3];
    Operand<BFloat16, side, Major::mn> response[3];
};

template <class Tile>
__device__ inline void store_parts(Tile (&tiles)[3], u32 offset, float (&value)[row_lanes]) {
#pragma unroll
    for (u32 p = 0; p < 3; ++p) {
        Vec16 whole;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            float part[2];
            whole.word[w] = BFloat16::narrow(value + 2 * w);
            BFloat16::widen(whole.word[w], part);
            value[2 * w] -= part[0], value[2 * w + 1] -= part[1];
        }
        *reinterpret_cast<Vec16*>(tiles[p].data + offset) = whole;
    }
}

extern "C" __global__ void __launch_bounds__(threads) sphere_mix(const __grid_constant__ SphereMix args) {
    Stage* const stages = reinterpret_cast<Stage*>(ptx::dynamic_shared());
    const u32 across = (args.points + side - 1) / side, down = (args.outputs + side - 1) / side;
    const u32 point = blockIdx.x % across * side, output = blockIdx.x / across % down * side, block = blockIdx.x / across / down;
    const char* const weight = args.weight + u64(block % args.groups) * args.outputs * args.padded * 4;
    const char* const response = args.x + u64(block) * args.terms * args.points * 4;
    const auto fill = [&](Stage& stage, u32 first) {
        constexpr int each = side * depth / row_lanes / threads;
        float value[each][row_lanes];
        const auto at = [&](int i) { return i * threads + threadIdx.x; };
        load_together<Float32, each>(weight, args.padded, [&](int i, u32& row, u32& column) {
            const bool inside = output + at(i) / 8 < args.outputs;
            row = inside ? output + at(i) / 8 : 0, column = inside ? first + at(i) % 8 * row_lanes : args.padded;
        }, value);
#pragma unroll
        for (int i = 0; i < each; ++i) store_parts(stage.weight, stage.weight[0].offset(at(i) / 8, at(i) % 8 * row_lanes), value[i]);
        load_together<Float32, each>(response, args.points, [&](int i, u32& row, u32& column) {
            const bool inside = first + at(i) / 16 < args.terms;
            row = inside ? first + at(i) / 16 : 0, column = inside ? point + at(i) % 16 * row_lanes : args.points;
        }, value);
#pragma unroll
        for (int i = 0; i < each; ++i) store_parts(stage.response, stage.response[0].offset(at(i) / 16, at(i) % 16 * row_lanes), value[i]);
        ptx::fence_proxy_async_shared();
    };
    SumTile<side> large, small;
    const int group = threadIdx.x / 128;
    fill(stages[0], 0);
    __syncthreads();
    for (u32 step = 0; step * depth < args.terms; ++step) {
        const Stage& now = stages[step % 2];
        ptx::wgmma_hold(large.value);
        ptx::wgmma_hold(small.value);
        ptx::wgmma_fence();
        large.multiply<MmaType::bf16>(now.weight[0], 64 * group, now.response[0], 0, step == 0);
        small.multiply<MmaType::bf16>(now.weight[0], 64 * group, now.response[1], 0, step == 0);
        small.multiply<MmaType::bf16>(now.weight[1], 64 * group, now.response[0], 0, false);
        small.multiply<MmaType::bf16>(now.weight[1], 64 * group, now.response[1], 0, false);
        small.multiply<MmaType::bf16>(now.weight[0], 64 * group, now.response[2], 0, false);
        small.multiply<MmaType::bf16>(now.weight[2], 64 * group, now.response[0], 0, false);
        ptx::wgmma_commit();
        if ((step + 1) * depth < args.terms) fill(stages[(step + 1) % 2], (step + 1) * depth);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(large.value);
        ptx::wgmma_hold(small.value);
        __syncthreads();
    }
    const u32 lane = Warp{}.thread(), first = output + threadIdx.x / warp_threads * 16 + lane / 4;
#pragma unroll
    for (u32 i = 0; i < side / 2; ++i) {
        const u32 row = first + i / 2 % 2 * 8, column = point + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row >= args.outputs || column >= args.points) continue;
        const u32 number = block % args.groups * args.outputs + row;
        const float bias = args.bias == nullptr ? 0.0f : args.bias[number];
        const u64 image = block / args.groups;
        args.y[(image * args.groups * args.outputs + number) * args.pitch + args.first + column] = large.value[i] + small.value[i] + bias;
    }
}
"""
SPHERE_MIX = LocalKernel(
    "sphere_mix", SOURCE, x=Pointer("const char*"), weight=Pointer("const char*"), bias=Pointer("const float*"), y=Pointer("float*"),
    groups=U32, outputs=U32, terms=U32, padded=U32, points=U32, pitch=U32, first=U32,
)  # fmt: skip
SIDE, STAGE_BYTES = 128, 6 * 128 * 64 * 2


class Mixing(NamedTuple):
    """Contiguous weights (outputs, channels of a group, filters), and a bias that is to be added here."""

    weight: torch.Tensor
    groups: int
    bias: torch.Tensor | None


@per_group
def _mix(group: Group, blocks: int) -> BoundKernel:
    return SPHERE_MIX.bind(group, grid=blocks, block=256, shared_bytes=2 * STAGE_BYTES)


def mix(group: Group, responses: torch.Tensor, mixing: Mixing, y: torch.Tensor, first: int) -> None:
    """Writes contiguous responses (images, groups, terms, points), mixed, to points from ``first`` on of y (images, outputs, ...)."""
    images, groups, terms, points = responses.shape
    outputs, padded = y.shape[1] // groups, -(-terms // 8) * 8  # whole vectors
    weight = F.pad(mixing.weight.view(-1, terms), (0, padded - terms)) if padded > terms else mixing.weight
    launch = _mix(group, images * groups * -(-outputs // SIDE) * -(-points // SIDE))
    launch(
        x=responses, weight=weight, bias=mixing.bias, y=y, groups=groups, outputs=outputs, terms=terms, padded=padded, points=points,
        pitch=y.stride(1), first=first,
    )  # fmt: skip
