"""Problem 20, dequantisation and an all-to-all: codes and scales travel, and their receiver multiplies.

A byte an element crosses the links where the reference sends four. Bound by HBM at large sizes, for results are float32; small ones are
bound by the launch and one trip of a flag. Codes lie in one of two buffers by the launch's parity. A rank that has finished a launch has
had a signal of it from every other rank, so all of them have finished the launch before."""

import torch

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int code_bytes = 4 / CODE::lanes, scale_bytes = 4 / SCALE::lanes;

extern "C" __global__ void __launch_bounds__(512)
    exchange_dequantize(const __grid_constant__ Arena arena, const __grid_constant__ ExchangeDequantize args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u32 buffer = (epoch & 1) * WORLD_SIZE;
    const u64 codes = args.codes + buffer * args.code_stride, scales = args.scales + buffer * u64(args.scale_stride);
    // A block of threads sends and takes the same blocks of elements on every rank.
    const Part part = part_of(args.blocks, blockIdx.x, gridDim.x);
    const u64 count = part.end - part.first, elements = args.blocks * BLOCK;
    for (int k = 1; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        const u64 to = arena.rank * args.code_stride + part.first * BLOCK * code_bytes;
        const char* source = args.y + (q * elements + part.first * BLOCK) * code_bytes;
        copy_bytes(Block{}, arena.peer(q, codes + to), source, count * BLOCK * code_bytes);
        char* target = arena.peer(q, scales + arena.rank * args.scale_stride + part.first * scale_bytes);
        copy_bytes(Block{}, target, args.s + (q * args.blocks + part.first) * scale_bytes, count * scale_bytes);
    }
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);

    for (int q = 0; q < WORLD_SIZE; ++q) {
        const bool own = q == arena.rank;
        const char* y = own ? args.y + q * elements * code_bytes : arena.local(codes + q * args.code_stride);
        const char* s = own ? args.s + q * args.blocks * scale_bytes : arena.local(scales + q * args.scale_stride);
        for (u64 i = part.first * BLOCK + threadIdx.x * row_lanes; i < part.end * BLOCK; i += blockDim.x * row_lanes) {
            const u32 left = u32(min(part.end * BLOCK - i, u64(row_lanes)));
            float value[row_lanes];
            RowOf<CODE>(y + i * code_bytes, 0, left).load(0, value);
            for (u32 e = 0; e < left; ++e) value[e] *= element_of<SCALE>(s, (i + e) / BLOCK);
            RowOf<Float32>(reinterpret_cast<char*>(args.out + q * elements + i), 0, left).store(0, value);
        }
    }
}
"""
EXCHANGE_DEQUANTIZE = DeclaredKernel(
    "exchange_dequantize", SOURCE, epochs=Epochs(), flags=Flags(), codes=Buffer(), scales=Buffer(), y=Pointer("const char*"),
    s=Pointer("const char*"), out=Pointer("float*"), blocks=U64, code_stride=U64, scale_stride=U32,
)  # fmt: skip


@per_group
def exchange_dequantize(group: Group, blocks: int, block: int, code: torch.dtype, scale: torch.dtype) -> BoundKernel:
    strides = [-(-nbytes // 16) * 16 for nbytes in (blocks * block * code.itemsize, blocks * scale.itemsize)]
    threads = min(512, group.max_threads)
    grid = min(group.sm_count, -(-blocks * block // (8 * threads)), blocks)
    return EXCHANGE_DEQUANTIZE.bind(
        group,
        grid=grid,
        block=threads,
        defines={"CODE": element_type(code), "SCALE": element_type(scale), "BLOCK": block},
        sizes={"flags": grid, **{name: 2 * group.world_size * size for name, size in zip(("codes", "scales"), strides, strict=True)}},
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
