"""Problem 20, dequantisation and an all-to-all: codes and scales travel, and their receiver multiplies.

A byte an element crosses the links where the reference sends four. A block's first warps send, in rounds; the others multiply, at first
what stays on the rank, then what a round has brought. Bound by HBM and the links at large sizes, for results are float32; small ones are
bound by the launch and one trip of a flag. Codes lie in one of two buffers by the launch's parity. A rank that has finished a launch has
had a signal of it from every other rank, so all of them have finished the launch before."""

import torch

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int code_bytes = 4 / CODE::lanes, scale_bytes = 4 / SCALE::lanes;

// Results of blocks of elements [piece.first, piece.end), several of a thread under way at a time.
__device__ inline void dequantize(const Warps& team, const char* y, const char* s, float* out, Part piece) {
    constexpr u32 quad = 4, words = quad / CODE::lanes, at_once = 8;
    struct alignas(4 * words) Codes {
        u32 word[words];
    };
    const u64 end = piece.end * BLOCK, step = team.size() * quad;
    u64 i = piece.first * BLOCK + team.thread() * quad;
    if (BLOCK % quad != 0 || !aligned_for<Codes>(y) || !aligned_for<Vec16>(out)) {
        for (; i < end; i += step) {
            for (u64 e = i; e < min(i + quad, end); ++e) out[e] = element_of<CODE>(y, e) * element_of<SCALE>(s, e / BLOCK);
        }
        return;
    }
    for (; i < end; i += at_once * step) {
        Codes codes[at_once];
        float scale[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            const u64 at = i + k * step;
            if (at >= end) continue;
            codes[k] = *reinterpret_cast<const Codes*>(y + at * code_bytes);
            scale[k] = element_of<SCALE>(s, at / BLOCK);
        }
#pragma unroll
        for (u32 k = 0; k < at_once; ++k) {
            if (i + k * step >= end) continue;
            float value[quad];
            Vec16 result;
#pragma unroll
            for (u32 w = 0; w < words; ++w) CODE::widen(codes[k].word[w], value + w * CODE::lanes);
#pragma unroll
            for (u32 e = 0; e < quad; ++e) result.word[e] = __float_as_uint(value[e] * scale[k]);
            *reinterpret_cast<Vec16*>(out + i + k * step) = result;
        }
    }
}

extern "C" __global__ void __launch_bounds__(512)
    exchange_dequantize(const __grid_constant__ Arena arena, const __grid_constant__ ExchangeDequantize args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u32 buffer = (epoch & 1) * WORLD_SIZE;
    const u64 codes = args.codes + buffer * args.code_stride, scales = args.scales + buffer * u64(args.scale_stride);
    // A block of threads sends and takes the same blocks of elements on every rank.
    const Part part = part_of(args.blocks, blockIdx.x, gridDim.x);
    const u64 elements = args.blocks * BLOCK;
    const auto piece_of = [&](u32 round) {
        const Part piece = part_of(part.end - part.first, round, ROUNDS);
        return Part{part.first + piece.first, part.first + piece.end};
    };
    const auto slot_of = [&](u32 round) { return round * gridDim.x + blockIdx.x; };
    const u32 warps = blockDim.x / warp_threads, senders = (warps + 3) / 4;
    if (threadIdx.x / warp_threads < senders) {
        const Warps team{0, senders, 1};
        for (u32 round = 0; round < ROUNDS; ++round) {
            const Part piece = piece_of(round);
            const u64 first = piece.first * BLOCK * code_bytes, bytes = (piece.end - piece.first) * BLOCK * code_bytes;
            for (int k = 1; k < WORLD_SIZE; ++k) {
                const int q = rank_after<WORLD_SIZE>(arena.rank, k);
                char* target = arena.peer(q, codes + arena.rank * args.code_stride + first);
                copy_bytes(team, target, args.y + q * elements * code_bytes + first, bytes);
                copy_bytes(team, arena.peer(q, scales + arena.rank * args.scale_stride + piece.first * scale_bytes),
                           args.s + (q * args.blocks + piece.first) * scale_bytes, (piece.end - piece.first) * scale_bytes);
            }
            Peers<WORLD_SIZE, Warps>(arena, args.flags, team).signal_all(slot_of(round), epoch);
        }
        return;
    }
    const Warps team{senders, warps - senders, 2};
    const u64 own = arena.rank;
    dequantize(team, args.y + own * elements * code_bytes, args.s + own * args.blocks * scale_bytes, args.out + own * elements, part);
    for (u32 round = 0; round < ROUNDS; ++round) {
        Peers<WORLD_SIZE, Warps>(arena, args.flags, team).wait_all_slots(slot_of(round), 1, epoch);
        for (int k = 1; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            const char* s = arena.local(scales + q * args.scale_stride);
            dequantize(team, arena.local(codes + q * args.code_stride), s, args.out + q * elements, piece_of(round));
        }
    }
}
"""
ROUNDS = 8
EXCHANGE_DEQUANTIZE = DeclaredKernel(
    "exchange_dequantize", SOURCE, epochs=Epochs(), flags=Flags(), codes=Buffer(), scales=Buffer(), y=Pointer("const char*"),
    s=Pointer("const char*"), out=Pointer("float*"), blocks=U64, code_stride=U64, scale_stride=U32,
)  # fmt: skip


@per_group
def exchange_dequantize(group: Group, blocks: int, block: int, code: torch.dtype, scale: torch.dtype) -> BoundKernel:
    strides = [-(-nbytes // 16) * 16 for nbytes in (blocks * block * code.itemsize, blocks * scale.itemsize)]
    threads = max(64, min(512, group.max_threads))
    grid = min(group.sm_count, -(-blocks * block // (8 * threads)), blocks)
    return EXCHANGE_DEQUANTIZE.bind(
        group,
        grid=grid,
        block=threads,
        defines={"CODE": element_type(code), "SCALE": element_type(scale), "BLOCK": block, "ROUNDS": ROUNDS},
        sizes={
            "flags": ROUNDS * grid,
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
