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

// use(block, its number in the part, whether it is there) for rank `owner`'s part, by LANES lanes each; all lanes of a warp call alike.
template <class Use>
__device__ inline void each_block(u64 blocks, int owner, const Use& use) {
    const Part part = part_of(blocks, owner, WORLD_SIZE);
    const u64 team = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES, teams = u64(gridDim.x) * blockDim.x / LANES;
    const u64 count = part.end - part.first, rounds = (count + teams - 1) / teams;
    for (u64 round = 0; round < rounds; ++round) {
        const u64 i = round * teams + team;
        use(part.first + i, i, i < count);
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
    for (int k = 0; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        each_block(args.blocks, q, [&](u64 block, u64 i, bool there) {
            u32 bits = 0;  // of the largest absolute value: NaN is above infinity
            float value[row_lanes];
            for (u32 column = lane * row_lanes; column < BLOCK && there; column += LANES * row_lanes) {
                row(args.x, block).load(column, value);
                for (float v : value) bits = max(bits, __float_as_uint(v) & 0x7fffffffu);
            }
            const float largest = __uint_as_float(warp_reduce<LANES>(bits, [](u32 a, u32 b) { return max(a, b); }));
            // Of an infinity, or NaN, the whole block is NaN.
            const float scale = largest < infinity ? fmaxf(largest, 1e-8f) / 127.0f : not_a_number;
            if (!there) return;
            for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
                row(args.x, block).load(column, value);
                u32 words[2] = {};
                for (int e = 0; e < row_lanes; ++e) {
                    const float code = fminf(fmaxf(rintf(value[e] / scale), -127.0f), 127.0f);
                    words[e / 4] |= (static_cast<u32>(static_cast<int>(code)) & 255) << e % 4 * 8;
                }
                store_words(arena.peer(q, codes + (arena.rank * args.part + i) * padded), column, padded, words);
            }
            if (lane == 0) *reinterpret_cast<float*>(arena.peer(q, scales + (arena.rank * args.part + i) * 4)) = scale;
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch);
    each_block(args.blocks, arena.rank, [&](u64 block, u64 i, bool there) {
        for (u32 column = lane * row_lanes; column < BLOCK && there; column += LANES * row_lanes) {
            float sum[row_lanes] = {};
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const float scale = *reinterpret_cast<const float*>(arena.local(scales + (q * args.part + i) * 4));
                u32 words[2];
                load_words(arena.local(codes + (q * args.part + i) * padded), column, padded, words);
                for (int e = 0; e < row_lanes; ++e) sum[e] += scale * static_cast<signed char>(words[e / 4] >> e % 4 * 8);
            }
            for (float& v : sum) v /= WORLD_SIZE;
            for (int k = 0; k < WORLD_SIZE; ++k) {
                row(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.out), block).store(column, sum);
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
