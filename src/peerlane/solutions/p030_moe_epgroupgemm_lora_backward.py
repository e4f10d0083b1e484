"""Problem 30, the sum of three gradients over ranks: one kernel for all three, in two shots; small ones are packed and travel as packets.

Each rank sums a part of every gradient, in float32 and rank order, and stores the sums to all ranks. Bound by the links, which carry
2 (W - 1) / W of the gradients. Small gradients are bound by two launches and one trip. Terms lie in one of two buffers by the
launch's parity. Results are stored behind the first barrier: all callers have then read those of the launch before."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import Group, communicator, group_of, per_group
from peerlane.device.declare import U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Pointer, array
from peerlane.device.kernels import element_type

SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

// use(vector, its number in the part) for all of rank `owner`'s part of a tensor; the same for a block of one number on all ranks.
template <class Use>
__device__ inline void each_vector(u64 bytes, int owner, const Use& use) {
    const Part part = part_of((bytes + sizeof(Vec16) - 1) / sizeof(Vec16), owner, WORLD_SIZE);
    for (u64 v = part.first + blockIdx.x * blockDim.x + threadIdx.x; v < part.end; v += gridDim.x * blockDim.x) use(v, v - part.first);
}

extern "C" __global__ void __launch_bounds__(512) sum_three(const __grid_constant__ Arena arena, const __grid_constant__ SumThree args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u64 terms = args.terms + (epoch & 1) * WORLD_SIZE * args.stride;
    const char* const in[3] = {args.first, args.second, args.third};
    for (int k = 1; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        for (int t = 0; t < 3; ++t) {
            each_vector(args.bytes[t], q, [&](u64 v, u64 i) {
                Vec16 value;
                load_words(in[t], v * sizeof(Vec16), args.bytes[t], value.word);
                *reinterpret_cast<Vec16*>(arena.peer(q, terms + arena.rank * args.stride + args.at[t] + i * sizeof(Vec16))) = value;
            });
        }
    }
    peers.barrier(blockIdx.x, 2 * epoch);
    for (int t = 0; t < 3; ++t) {
        each_vector(args.bytes[t], arena.rank, [&](u64 v, u64 i) {
            u32 own[4], values[WORLD_SIZE][4], total[4];
            load_words(in[t], v * sizeof(Vec16), args.bytes[t], own);
            for (int q = 0; q < WORLD_SIZE; ++q) {
                const char* term = arena.local(terms + q * args.stride + args.at[t] + i * sizeof(Vec16));
                for (int w = 0; w < 4; ++w) values[q][w] = reinterpret_cast<const Vec16*>(term)->word[w];
            }
            sum_in_rank_order<ELEMENT, WORLD_SIZE>(arena.rank, own, values, total);
            for (int k = 0; k < WORLD_SIZE; ++k) {
                char* result = arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.out + args.out_at[t]);
                store_words(result, v * sizeof(Vec16), args.bytes[t], total);
            }
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
SUM_THREE = DeclaredKernel(
    "sum_three", SOURCE, epochs=Epochs(), flags=Flags(), terms=Buffer(), out=Buffer(), first=Pointer("const char*"),
    second=Pointer("const char*"), third=Pointer("const char*"), bytes=array(U64, 3), at=array(U64, 3), out_at=array(U64, 3), stride=U64,
)  # fmt: skip
Shapes = tuple[tuple[int, ...], ...]
PACKED_BYTES = 1 << 18


@per_group
def sum_three(group: Group, shapes: Shapes, dtype: torch.dtype) -> tuple[BoundKernel, tuple[torch.Tensor, ...]]:
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
    parts = [-(-size // 16 // group.world_size) * 16 + 16 for size in sizes]  # the largest part of a rank, at least
    at, padded = [0, parts[0], parts[0] + parts[1]], [-(-size // 16) * 16 for size in sizes]
    out_at = [0, padded[0], padded[0] + padded[1]]
    threads, stride = min(512, group.max_threads), sum(parts)
    grid = max(1, min(group.sm_count, -(-max(parts) // (16 * threads))))
    room = {"flags": grid, "terms": 2 * group.world_size * stride, "out": sum(padded)}
    bound = SUM_THREE.bind(group, grid=grid, block=threads, defines={"ELEMENT": element_type(dtype)}, sizes=room, stride=stride)
    bound.set(bytes=sizes, at=at, out_at=out_at)
    whole = bound.tensor("out", (sum(padded) // dtype.itemsize,), dtype)
    begin = [place // dtype.itemsize for place in out_at]
    results = (whole[first : first + torch.Size(shape).numel()].view(shape) for first, shape in zip(begin, shapes, strict=True))
    return bound, tuple(results)


def solution(
    grad_fc1_1_lora_A: torch.Tensor,
    grad_fc1_2_lora_A: torch.Tensor,
    grad_fc2_lora_B: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = [tensor.contiguous() for tensor in (grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B)]
    if sum(tensor.nbytes for tensor in tensors) <= PACKED_BYTES:
        packed = torch.cat([tensor.view(-1) for tensor in tensors])
        communicator(group).all_reduce(packed)
        parts = packed.split([tensor.numel() for tensor in tensors])
        return parts[0].view_as(tensors[0]), parts[1].view_as(tensors[1]), parts[2].view_as(tensors[2])
    launch, (first, second, third) = sum_three(group_of(group), tuple(tuple(tensor.shape) for tensor in tensors), tensors[0].dtype)
    launch(first=tensors[0], second=tensors[1], third=tensors[2])
    return first, second, third
