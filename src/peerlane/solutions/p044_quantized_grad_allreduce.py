"""Problem 44, the mean of gradients that travel as int8 codes: one kernel in one or two shots, whichever sends less.

One shot: codes and scales go to every rank, which adds what they stand for in float32 and keeps the mean; two ranks do so, and four in
float32. Two shots: codes of a part of the blocks go to their owner, who stores the mean to all ranks. Both add in rank order. Bound by the
links at large sizes, by the launch and a trip of a flag for each shot at small ones. Codes lie in one of two buffers by the launch's
parity. Other ranks' results are stored behind the first barrier: all callers have then read those of the launch before.

The next call overwrites the results, which lie in the arena."""

import torch

from peerlane.device import U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 padded = (BLOCK + row_lanes - 1) / row_lanes * row_lanes, element_bytes = 4 / ELEMENT::lanes;
constexpr int parts = EVERYBODY ? 1 : WORLD_SIZE, at_once = 4;

// use(block, its number in the part, there) for rank `owner`'s part: LANES lanes take the `there` blocks from this one on, 0 to at_once;
// all lanes of a warp call alike.
template <class Use>
__device__ inline void each_blocks(u64 blocks, int owner, const Use& use) {
    const Part part = part_of(blocks, EVERYBODY ? 0 : owner, parts);
    const u64 team = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES, teams = u64(gridDim.x) * blockDim.x / LANES;
    const u64 count = part.end - part.first, rounds = (count + at_once * teams - 1) / (at_once * teams);
    for (u64 round = 0; round < rounds; ++round) {
        const u64 i = (round * teams + team) * at_once;
        use(part.first + i, i, i < count ? static_cast<u32>(min(count - i, u64(at_once))) : 0);
    }
}

extern "C" __global__ void __launch_bounds__(512) int8_mean(const __grid_constant__ Arena arena, const __grid_constant__ Int8Mean args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), lane = threadIdx.x % LANES;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u64 buffer = (epoch & 1) * WORLD_SIZE * args.part, codes = args.codes + buffer * padded, scales = args.scales + buffer * 4;
    const auto row = [&](auto* array, u64 block) {  // the block's elements; the last block may be short
        const u64 first = block * BLOCK;
        return RowOf<ELEMENT>(array + first * element_bytes, 0, u32(first < args.count ? min(args.count - first, u64(BLOCK)) : 0));
    };
    for (int k = 1; k <= parts; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        each_blocks(args.blocks, q, [&](u64 block, u64 i, u32 there) {
            u32 bits[at_once] = {};  // of the largest absolute values: NaN is above infinity; then of scales
            float value[at_once][row_lanes], scale[at_once], inverse[at_once];
            const auto load = [&](u32 column) {
                if constexpr (BLOCK % row_lanes == 0) {
                    const u32 left = there == 0 ? 0 : static_cast<u32>(min(args.count - block * BLOCK, u64(there) * BLOCK));
                    const auto place = [&](int e, u32& row, u32& at) { row = 0, at = min(e * BLOCK + column, left); };
                    load_together<ELEMENT, at_once>(args.x + block * BLOCK * element_bytes, left, place, value);
                } else {
                    for (int e = 0; e < at_once; ++e) row(args.x, block + e).load(column, value[e]);
                }
            };
            for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
                load(column);
                for (int e = 0; e < at_once; ++e) {
                    for (float v : value[e]) bits[e] = max(bits[e], __float_as_uint(v) & 0x7fffffffu);
                }
            }
#pragma unroll
            for (int e = 0; e < at_once; ++e) {
                const float largest = __uint_as_float(warp_reduce<LANES>(bits[e], [](u32 a, u32 b) { return max(a, b); }));
                // Of an infinity, or NaN, the whole block is NaN.
                scale[e] = largest < infinity ? fmaxf(largest, 1e-8f) / 127.0f : not_a_number, inverse[e] = 1.0f / scale[e];
                bits[e] = __float_as_uint(scale[e]);
            }
            for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
                if (BLOCK > LANES * row_lanes) load(column);
#pragma unroll
                for (int e = 0; e < at_once; ++e) {
                    u32 words[2] = {};
                    for (int l = 0; l < row_lanes; ++l) {
                        const float code = fminf(fmaxf(rintf(quotient(value[e][l], scale[e], inverse[e])), -127.0f), 127.0f);
                        words[l / 4] |= (static_cast<u32>(static_cast<int>(code)) & 255) << l % 4 * 8;
                    }
                    for (int t = 0; t < WORLD_SIZE / parts && e < there; ++t) {
                        char* const to = arena.peer(rank_after<WORLD_SIZE>(q, t), codes + (arena.rank * args.part + i + e) * padded);
                        store_words(to, column, padded, words);
                    }
                }
            }
            for (int t = 0; t < WORLD_SIZE / parts && lane == 0 && there > 0; ++t) {
                char* const to = arena.peer(rank_after<WORLD_SIZE>(q, t), scales + (arena.rank * args.part + i) * 4);
                *reinterpret_cast<Vec16*>(to) = Vec16{{bits[0], bits[1], bits[2], bits[3]}};
            }
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch);
    each_blocks(args.blocks, arena.rank, [&](u64 block, u64 i, u32 there) {
        for (u32 column = lane * row_lanes; column < BLOCK && there > 0; column += LANES * row_lanes) {
            float sum[at_once][row_lanes] = {};
#pragma unroll
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const Vec16 scale = *reinterpret_cast<const Vec16*>(arena.local(scales + (q * args.part + i) * 4));
                u64 code[at_once];
#pragma unroll
                for (int e = 0; e < at_once; ++e) {
                    code[e] = *reinterpret_cast<const u64*>(arena.local(codes + (q * args.part + i + e) * padded + column));
                }
#pragma unroll
                for (int e = 0; e < at_once; ++e) {
                    const float of_block = __uint_as_float(scale.word[e]);
                    for (int l = 0; l < row_lanes; ++l) sum[e][l] += of_block * static_cast<signed char>(code[e] >> l * 8);
                }
            }
#pragma unroll
            for (int e = 0; e < at_once; ++e) {
                for (float& v : sum[e]) v /= WORLD_SIZE;
                for (int t = 0; t < parts && e < there; ++t) {
                    row(arena.peer(rank_after<WORLD_SIZE>(arena.rank, t), args.out), block + e).store(column, sum[e]);
                }
            }
        }
    });
    if (!EVERYBODY) peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
INT8_MEAN = DeclaredKernel(
    "int8_mean", SOURCE, epochs=Epochs(), flags=Flags(), codes=Buffer(), scales=Buffer(), out=Buffer(), x=Pointer("const char*"),
    count=U64, blocks=U64, part=U64,
)  # fmt: skip


@per_group
def int8_mean(group: Group, shape: tuple[int, ...], dtype: torch.dtype, block: int) -> tuple[BoundKernel, torch.Tensor]:
    count = torch.Size(shape).numel()
    blocks, lanes = -(-count // block), next((lanes for lanes in (1, 2, 4, 8, 16) if 8 * lanes >= block), 32)
    coded = count + 4 * blocks
    everybody = group.world_size * coded <= coded + count * dtype.itemsize
    part = -(-blocks // (1 if everybody else group.world_size) // 4) * 4  # whole vectors of scales
    threads = min(512 if part // 4 * lanes > 256 * group.sm_count else 256, group.max_threads)  # few blocks: on more SMs
    grid = min(group.sm_count, -(-part // 4 * lanes // threads))
    places = 2 * group.world_size * part
    bound = INT8_MEAN.bind(
        group,
        grid=grid,
        block=threads,
        defines={"ELEMENT": element_type(dtype), "BLOCK": block, "LANES": lanes, "EVERYBODY": int(everybody)},
        sizes={"flags": grid, "codes": places * -(-block // 8) * 8, "scales": places * 4, "out": count * dtype.itemsize},
        count=count,
        blocks=blocks,
        part=part,
    )
    return bound, bound.tensor("out", shape, dtype)


def solution(flat_grad: torch.Tensor, block_size: int) -> torch.Tensor:
    if not flat_grad.numel():
        return torch.empty_like(flat_grad)
    launch, mean = int8_mean(group_of(), tuple(flat_grad.shape), flat_grad.dtype, block_size)
    launch(x=flat_grad.contiguous())
    return mean
