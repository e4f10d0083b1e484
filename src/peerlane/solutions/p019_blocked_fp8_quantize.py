"""Problem 19, block-wise quantisation and an all-gather: one kernel stores codes and scales where they belong in all ranks' results.

A byte an element and four a block cross the links. Bound by the links at large sizes, as W - 1 copies of every code leave the rank; small
tensors are bound by the launch and two trips of a flag.

The next call overwrites the results, which lie in the arena."""

import torch

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// LANES neighbouring lanes take a block of BLOCK elements, eight each at a time.
extern "C" __global__ void __launch_bounds__(512)
    quantize_gather(const __grid_constant__ Arena arena, const __grid_constant__ QuantizeGather args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    peers.wait_all(0, epoch);  // their callers have read the results of the launch before
    const u32 lane = threadIdx.x % LANES, team = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, teams = gridDim.x * blockDim.x / LANES;
    const u32 rounds = (args.blocks + teams - 1) / teams;  // of all lanes alike, for the shuffles
    for (u32 round = 0; round < rounds; ++round) {
        const u32 block = round * teams + team;
        const bool there = block < args.blocks;
        const RowOf<ELEMENT> row(args.x, there ? block : 0, BLOCK);
        float value[row_lanes], largest = 0.0f;
        for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
            row.load(column, value);
            for (float v : value) largest = fmaxf(largest, fabsf(v));
        }
        largest = warp_reduce<LANES>(largest, [](float a, float b) { return fmaxf(a, b); });
        const float scale = largest / 448.0f, divisor = scale == 0.0f ? 1.0f : scale;
        if (!there) continue;
        const u64 at = u64(arena.rank) * args.blocks;
        for (u32 column = lane * row_lanes; column < BLOCK; column += LANES * row_lanes) {
            row.load(column, value);
            for (float& v : value) v /= divisor;
            for (int k = 0; k < WORLD_SIZE; ++k) {
                RowOf<Float8E4M3>(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.codes), at + block, BLOCK).store(column, value);
            }
        }
        for (u32 k = lane; k < WORLD_SIZE; k += LANES) {
            reinterpret_cast<float*>(arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.scales))[at + block] = scale;
        }
    }
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
QUANTIZE_GATHER = DeclaredKernel(
    "quantize_gather", SOURCE, epochs=Epochs(), flags=Flags(), codes=Buffer(), scales=Buffer(), x=Pointer("const char*"), blocks=U32
)


@per_group
def quantize_gather(group: Group, shape: tuple[int, ...], dtype: torch.dtype, block: int) -> tuple[BoundKernel, torch.Tensor, torch.Tensor]:
    whole = (group.world_size * shape[0], *shape[1:])
    per_block = (*whole[:-1], whole[-1] // block)
    elements = torch.Size(whole).numel()
    lanes = next((lanes for lanes in (1, 2, 4, 8, 16) if 8 * lanes >= block), 32)
    threads = min(512, group.max_threads)
    grid = min(group.sm_count, -(-elements * lanes // (group.world_size * block * threads)))
    bound = QUANTIZE_GATHER.bind(
        group,
        grid=grid,
        block=threads,
        defines={"ELEMENT": element_type(dtype), "BLOCK": block, "LANES": lanes},
        sizes={"flags": 1 + grid, "codes": elements, "scales": elements // block * 4},
        blocks=elements // group.world_size // block,
    )
    return bound, bound.tensor("codes", whole, torch.float8_e4m3fn), bound.tensor("scales", per_block, torch.float32)


def solution(local_tensor: torch.Tensor, block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    shape = tuple(local_tensor.shape)
    if shape[-1] % block_size:
        raise UsageError(f"the last axis has {shape[-1]} elements; expected a multiple of block_size = {block_size}")
    if not local_tensor.numel():
        blocks = (*shape[:-1], shape[-1] // block_size)
        return local_tensor.new_empty(shape, dtype=torch.float8_e4m3fn), local_tensor.new_empty(blocks, dtype=torch.float32)
    launch, codes, scales = quantize_gather(group_of(), shape, local_tensor.dtype, block_size)
    launch(x=local_tensor.contiguous())
    return codes, scales
