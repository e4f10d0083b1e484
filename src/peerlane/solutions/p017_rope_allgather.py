"""Problem 17, rotary embedding and an all-gather along the sequence: one kernel rotates in registers and stores to all ranks' results.

Queries and keys are one list of rows, so that two gathers and two copies are gone. Bound by the links: W - 1 copies of the rotated rows
leave each rank. The public shape is bound by the launch and two trips of a flag: peers have begun, peers have stored.

The next call overwrites the results, which lie in the arena."""

import torch

from peerlane.device import (
    U32,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    array,
    element_type,
    group_of,
    per_group,
)

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int x_bytes = 4 / X_TYPE::lanes, table_bytes = 4 / TABLE_TYPE::lanes, y_bytes = 4 / Y_TYPE::lanes;

// Eight elements at a time of the first half of a row, and the eight that they turn with.
__device__ void rotate_and_send(const Arena& arena, const RopeGather& args, const char* x, u32 heads, u64 out) {
    const u32 half = args.depth / 2, steps = (half + row_lanes - 1) / row_lanes;
    const u64 items = u64(args.batch) * args.local * heads * steps;
    for (u64 item = u64(blockIdx.x) * blockDim.x + threadIdx.x; item < items; item += u64(gridDim.x) * blockDim.x) {
        const u64 row = item / steps, place = row / heads;  // of the head, and of the position
        const u32 column = u32(item % steps) * row_lanes;
        float x1[row_lanes], x2[row_lanes], cos1[row_lanes], cos2[row_lanes], sin1[row_lanes], sin2[row_lanes];
        RowOf<X_TYPE>(x, 2 * row, half).load(column, x1);
        RowOf<X_TYPE>(x, 2 * row + 1, half).load(column, x2);
        RowOf<TABLE_TYPE>(args.cos, 2 * place, half).load(column, cos1);
        RowOf<TABLE_TYPE>(args.cos, 2 * place + 1, half).load(column, cos2);
        RowOf<TABLE_TYPE>(args.sin, 2 * place, half).load(column, sin1);
        RowOf<TABLE_TYPE>(args.sin, 2 * place + 1, half).load(column, sin2);
        for (int e = 0; e < row_lanes; ++e) {
            const float first = x1[e], second = x2[e];
            x1[e] = first * cos1[e] - second * sin1[e];
            x2[e] = second * cos2[e] + first * sin2[e];
        }
        const u64 batch = place / args.local, position = arena.rank * args.local + place % args.local;
        const u64 target = (batch * WORLD_SIZE * args.local + position) * heads + row % heads;
        for (int k = 0; k < WORLD_SIZE; ++k) {
            char* result = arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), out);
            RowOf<Y_TYPE>(result, 2 * target, half).store(column, x1);
            RowOf<Y_TYPE>(result, 2 * target + 1, half).store(column, x2);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512)
    rope_gather(const __grid_constant__ Arena arena, const __grid_constant__ RopeGather args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    peers.wait_all(0, epoch);  // their callers have read the results of the launch before
    rotate_and_send(arena, args, args.q, args.heads[0], args.q_out);
    rotate_and_send(arena, args, args.k, args.heads[1], args.k_out);
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
ROPE_GATHER = DeclaredKernel(
    "rope_gather", SOURCE, epochs=Epochs(), flags=Flags(), q_out=Buffer(), k_out=Buffer(), q=Pointer("const char*"),
    k=Pointer("const char*"), cos=Pointer("const char*"), sin=Pointer("const char*"), batch=U32, local=U32, depth=U32, heads=array(U32, 2),
)  # fmt: skip
Shape = tuple[int, ...]


@per_group
def rope_gather(
    group: Group, q: Shape, k: Shape, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[BoundKernel, torch.Tensor, torch.Tensor]:
    batch, local, _, depth = q
    result = torch.promote_types(*dtypes)
    q_out, k_out = ((batch, group.world_size * local, shape[2], depth) for shape in (q, k))
    threads = min(512, group.max_threads)
    grid = min(group.sm_count, -(-torch.Size(q).numel() // (16 * threads)))
    types = dict(zip(("X_TYPE", "TABLE_TYPE", "Y_TYPE"), map(element_type, (*dtypes, result)), strict=True))
    sizes = {"flags": 1 + grid, **{name: torch.Size(out).numel() * result.itemsize for name, out in (("q_out", q_out), ("k_out", k_out))}}
    bound = ROPE_GATHER.bind(group, grid=grid, block=threads, defines=types, sizes=sizes, batch=batch, local=local, depth=depth)
    bound.set(heads=(q[2], k[2]))
    return bound, bound.tensor("q_out", q_out, result), bound.tensor("k_out", k_out, result)


def solution(
    q_local: torch.Tensor, k_local: torch.Tensor, cos_local: torch.Tensor, sin_local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, cos, sin = (tensor.contiguous() for tensor in (q_local, k_local, cos_local, sin_local))
    launch, q_out, k_out = rope_gather(group_of(), tuple(q.shape), tuple(k.shape), (q.dtype, cos.dtype))
    launch(q=q, k=k, cos=cos, sin=sin)
    return q_out, k_out
