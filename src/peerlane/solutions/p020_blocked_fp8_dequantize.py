"""Problem 20, dequantisation and an all-to-all: codes and scales travel, and their receiver multiplies.

A byte an element crosses the links where the reference sends four. Some warps of a block send, a piece at a time, with a flag behind
each. The others multiply meanwhile: what is for the rank itself, then pieces as they come. Bound by the links, or by HBM, for results are
float32; small sizes by the launch and one trip of a flag. Codes lie in one of two buffers by the launch's parity. A rank that has finished
a launch has had a signal of it from every other rank, so all of them have finished the launch before."""

from __future__ import annotations

import torch

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int code_bytes = 4 / CODE::lanes, scale_bytes = 4 / SCALE::lanes, together = 4;

// Elements [first, end) of one source, by some warps.
__device__ void decode(const Warps& team, const char* y, const char* s, float* out, u64 first, u64 end) {
    const u64 step = u64(team.size()) * row_lanes;
    for (u64 begin = first + team.thread() * row_lanes; begin < end; begin += together * step) {
        float value[together][row_lanes];
        const auto left = [&](int t) {
            const u64 i = begin + t * step;
            return i < end ? static_cast<u32>(min(end - i, u64(row_lanes))) : 0u;
        };
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (left(t) > 0) RowOf<CODE>(y + (begin + t * step) * code_bytes, 0, left(t)).load(0, value[t]);
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const u64 i = begin + t * step;
            if (left(t) == 0) continue;
            float scale = element_of<SCALE>(s, i / BLOCK);
#pragma unroll
            for (u32 e = 0; e < row_lanes; ++e) {
                if (BLOCK % row_lanes != 0 && e < left(t)) scale = element_of<SCALE>(s, (i + e) / BLOCK);
                value[t][e] *= scale;
            }
            RowOf<Float32>(reinterpret_cast<char*>(out + i), 0, left(t)).store(0, value[t]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange_dequantize(const __grid_constant__ Arena arena, const __grid_constant__ ExchangeDequantize args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u32 buffer = (epoch & 1) * WORLD_SIZE;
    const u64 codes = args.codes + buffer * args.code_stride, scales = args.scales + buffer * u64(args.scale_stride);
    // A block of threads sends and takes the same blocks of elements on every rank, in the same pieces.
    const Part part = part_of(args.blocks, blockIdx.x, gridDim.x);
    const u64 elements = args.blocks * BLOCK, senders = THREADS / warp_threads / 3 + 1;
    const auto piece = [&](u32 c) {
        const Part own = part_of(part.end - part.first, c, PIECES);
        return Part{part.first + own.first, part.first + own.end};
    };
    if (threadIdx.x < senders * warp_threads) {
        const Warps team{0, u32(senders), 1};
        const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team, communicator);
        for (u32 c = 0; c < PIECES; ++c) {
            const auto [first, end] = piece(c);
            for (int k = 1; k < WORLD_SIZE; ++k) {
                const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                const u64 to = arena.rank * args.code_stride + first * BLOCK * code_bytes;
                const char* source = args.y + (q * elements + first * BLOCK) * code_bytes;
                copy_bytes(team, arena.peer(q, codes + to), source, (end - first) * BLOCK * code_bytes);
                char* target = arena.peer(q, scales + arena.rank * args.scale_stride + first * scale_bytes);
                copy_bytes(team, target, args.s + (q * args.blocks + first) * scale_bytes, (end - first) * scale_bytes);
            }
            peers.signal_all(blockIdx.x * PIECES + c, epoch);
        }
        return;
    }
    const Warps team{u32(senders), u32(THREADS / warp_threads - senders), 2};
    const Peers<WORLD_SIZE, Warps> peers(arena, args.flags, team, consumer);
    const u64 mine = arena.rank * elements;
    const char* own_scales = args.s + arena.rank * args.blocks * scale_bytes;
    decode(team, args.y + mine * code_bytes, own_scales, args.out + mine, part.first * BLOCK, part.end * BLOCK);
    for (u32 c = 0; c < PIECES; ++c) {
        const auto [first, end] = piece(c);
        peers.wait_all(blockIdx.x * PIECES + c, epoch);
        for (int k = 1; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            decode(team, arena.local(codes + q * args.code_stride), arena.local(scales + q * args.scale_stride), args.out + q * elements,
                   first * BLOCK, end * BLOCK);
        }
    }
}
"""
EXCHANGE_DEQUANTIZE = DeclaredKernel(
    "exchange_dequantize", SOURCE, epochs=Epochs(), flags=Flags(), codes=Buffer(), scales=Buffer(), y=Pointer("const char*"),
    s=Pointer("const char*"), out=Pointer("float*"), blocks=U64, code_stride=U64, scale_stride=U32,
)  # fmt: skip


MOST_PIECES, PIECE_BYTES = 8, 64 << 10
"""Of what a block of threads sends to a rank."""


@per_group
def exchange_dequantize(group: Group, blocks: int, block: int, code: torch.dtype, scale: torch.dtype) -> BoundKernel:
    strides = [-(-nbytes // 16) * 16 for nbytes in (blocks * block * code.itemsize, blocks * scale.itemsize)]
    threads = max(64, min(512, group.max_threads))
    grid = min(group.sm_count, -(-blocks * block // (8 * threads)), blocks)
    pieces = max(1, min(MOST_PIECES, strides[0] // (grid * PIECE_BYTES)))
    return EXCHANGE_DEQUANTIZE.bind(
        group,
        grid=grid,
        block=threads,
        defines={
            "CODE": element_type(code),
            "SCALE": element_type(scale),
            "BLOCK": block,
            "THREADS": threads,
            "PIECES": pieces,
        },
        sizes={
            "flags": grid * pieces,
            **{name: 2 * group.world_size * size for name, size in zip(("codes", "scales"), strides, strict=True)},
        },
        blocks=blocks,
        code_stride=strides[0],
        scale_stride=strides[1],
    )


def solution(local_y: torch.Tensor, local_s: torch.Tensor, block_size: int = 128) -> torch.Tensor:
    ranks = group_of()
    elements = local_y[0].numel()
    if local_y.shape[0] != ranks.world_size or elements % block_size:
        raise UsageError(f"local_y is {tuple(local_y.shape)}; expected {ranks.world_size} slices of a multiple of {block_size} elements")
    out = torch.empty(local_y.shape, dtype=torch.float32, device=local_y.device)
    if elements:
        launch = exchange_dequantize(ranks, elements // block_size, block_size, local_y.dtype, local_s.dtype)
        launch(y=local_y.contiguous(), s=local_s.contiguous(), out=out)
    return out
