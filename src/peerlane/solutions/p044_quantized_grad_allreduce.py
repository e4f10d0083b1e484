"""Problem 44, the mean of gradients that travel as int8 codes: one kernel in two shots.

Codes and scales of a part of the blocks go to their owner, who adds what they stand for in float32 and stores the mean to all ranks.
A byte an element leaves and the result's dtype comes back, where the reference sends float32 both ways. Bound by the links at large
sizes, by the launch and two trips of a flag at small ones. Codes lie in one of two buffers by the launch's parity. Results are stored
behind the first barrier: all callers have then read those of the launch before.

The next call overwrites the results, which lie in the arena."""

import torch

from peerlane.device import U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 padded = (BLOCK + row_lanes - 1) / row_lanes * row_lanes, element_bytes = 4 / ELEMENT::lanes;

constexpr int together = 4;  // blocks of a team

// Of a part of `count` blocks: use(i, step) for the first of a team's next blocks, which are `step` apart. Teams have LANES lanes;
// all lanes of a warp call alike, also behind the part's end.
template <class Use>
__device__ inline void each_blocks(u64 count, const Use& use) {
    const u64 team = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES, teams = u64(gridDim.x) * blockDim.x / LANES;
    const u64 rounds = (count + together * teams - 1) / (together * teams);
    for (u64 round = 0; round < rounds; ++round) use(round * together * teams + team, teams);
}

extern "C" __global__ void __launch_bounds__(512, 1) int8_mean(const __grid_constant__ Arena arena, const __grid_constant__ Int8Mean args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), lane = threadIdx.x % LANES;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u64 buffer = (epoch & 1) * WORLD_SIZE * args.part, codes = args.codes + buffer * padded, scales = args.scales + buffer * 4;
    const auto row = [&](auto* array, u64 block) {  // the block's elements; the last block may be short
        const u64 first = block * BLOCK;
        return RowOf<ELEMENT>(array + first * element_bytes, 0, u32(first < args.count ? min(args.count - first, u64(BLOCK)) : 0));
    };
    // Eight columns of blocks first + i, first + i + step, ...: zero behind the last one, and behind the end of a short one.
    const auto load = [&](const Part& part, u64 i, u64 step, u32 column, float (&value)[together][row_lanes]) {
        const auto there = [&](int e) { return part.first + i + e * step < part.end; };
        const auto whole = [&](int e) { return there(e) && (part.first + i + e * step + 1) * BLOCK <= args.count; };
        const auto place = [&](int e, u32& its_row, u32& its_column) {
            its_row = static_cast<u32>(part.first + i + e * step), its_column = whole(e) ? column : BLOCK;
        };
        load_together<ELEMENT, together>(args.x, BLOCK, place, value);
#pragma unroll
        for (int e = 0; e < together; ++e) {
            if (there(e) && !whole(e)) row(args.x, part.first + i + e * step).load(column, value[e]);
        }
    };
    for (int k = 0; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        const Part part = part_of(args.blocks, q, WORLD_SIZE);
        each_blocks(part.end - part.first, [&](u64 i, u64 step) {
            u32 bits[together] = {};  // of the largest absolute value: NaN is above infinity
            float value[together][row_lanes], scale[together];
            for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
                load(part, i, step, column, value);
#pragma unroll
                for (int e = 0; e < together; ++e) {
                    for (float v : value[e]) bits[e] = max(bits[e], __float_as_uint(v) & 0x7fffffffu);
                }
            }
#pragma unroll
            for (int e = 0; e < together; ++e) {
                const float largest = __uint_as_float(warp_reduce<LANES>(bits[e], [](u32 a, u32 b) { return max(a, b); }));
                // Of an infinity, or NaN, the whole block is NaN.
                scale[e] = largest < infinity ? fmaxf(largest, 1e-8f) / 127.0f : not_a_number;
            }
            for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
                if (LANES * row_lanes < BLOCK) load(part, i, step, column, value);
#pragma unroll
                for (int e = 0; e < together; ++e) {
                    const u64 at = arena.rank * args.part + i + e * step;
                    if (part.first + i + e * step >= part.end) break;
                    u32 words[2] = {};
                    for (int l = 0; l < row_lanes; ++l) {
                        const float code = fminf(fmaxf(rintf(value[e][l] / scale[e]), -127.0f), 127.0f);
                        words[l / 4] |= (static_cast<u32>(static_cast<int>(code)) & 255) << l % 4 * 8;
                    }
                    store_words(arena.peer(q, codes + at * padded), column, padded, words);
                    if (column == 0) *reinterpret_cast<float*>(arena.peer(q, scales + at * 4)) = scale[e];
                }
            }
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch);
    const Part part = part_of(args.blocks, arena.rank, WORLD_SIZE);
    each_blocks(part.end - part.first, [&](u64 i, u64 step) {
        for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
            float sum[together][row_lanes] = {};
            for (int q = 0; q < WORLD_SIZE; ++q) {
                float scale[together];
                u64 code[together];
#pragma unroll
                for (int e = 0; e < together; ++e) {
                    const u64 at = q * args.part + i + e * step;
                    if (part.first + i + e * step >= part.end) break;
                    scale[e] = *reinterpret_cast<const float*>(arena.local(scales + at * 4));
                    code[e] = *reinterpret_cast<const u64*>(arena.local(codes + at * padded + column));
                }
#pragma unroll
                for (int e = 0; e < together; ++e) {
                    if (part.first + i + e * step >= part.end) break;
                    for (int l = 0; l < row_lanes; ++l) sum[e][l] += scale[e] * static_cast<signed char>(code[e] >> 8 * l);
                }
            }
#pragma unroll
            for (int e = 0; e < together; ++e) {
                if (part.first + i + e * step >= part.end) break;
                for (float& v : sum[e]) v /= WORLD_SIZE;
                for (int k = 0; k < WORLD_SIZE; ++k) {
                    row(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.out), part.first + i + e * step).store(column, sum[e]);
                }
            }
        }
    });
    peers.barrier(blockIdx.x, 2 * epoch + 1);
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
    part, threads = -(-blocks // group.world_size), min(512, group.max_threads)
    grid = min(group.sm_count, -(-part * lanes // threads))
    places = 2 * group.world_size * part
    bound = INT8_MEAN.bind(
        group,
        grid=grid,
        block=threads,
        defines={"ELEMENT": element_type(dtype), "BLOCK": block, "LANES": lanes},
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
