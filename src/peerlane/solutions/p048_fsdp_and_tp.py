"""Problem 48, a SwiGLU MLP on a grid of ranks: one kernel gathers all three weights, and one sums results within a tensor-parallel group.

The gathering kernel stores W1 and W2 side by side, so that one product makes gate and up, and W3 as whole rows. The summing kernel sends
parts to their owners, which add them in float32 and rank order; the others read the sums at the owners. Both communicate within one launch.
Bound by the products at large sizes, by six launches at the public one."""

import torch

from peerlane.device import (
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    communicator,
    element_type,
    group_of,
    per_group,
)
from peerlane.device.moe.exchange import room_for

GATHER = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// Rows are those of W1, W2 and W3. Gathered weights lie in one place: a rank stores when all others have begun the launch.
extern "C" __global__ void __launch_bounds__(512)
    gather_shards(const __grid_constant__ Arena arena, const __grid_constant__ GatherShards args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    peers.wait_all(0, epoch);
    const u32 own = arena.rank / TENSOR_RANKS, tensor_rank = arena.rank % TENSOR_RANKS, shards = WORLD_SIZE / TENSOR_RANKS;
    each_row(2 * args.rows + args.inner, [&](u32 row) {
        const bool up = row >= args.rows, down = row >= 2 * args.rows;
        const u32 at = row - (down ? 2 : up) * args.rows;
        const u64 bytes = down ? args.row_bytes : args.inner_bytes;
        const char* from = (down ? args.w3 : up ? args.w2 : args.w1) + at * bytes;
        const u64 to = down ? args.down + (u64(at) * shards + own) * bytes : args.gate_up + ((u64(own) * args.rows + at) * 2 + up) * bytes;
        for (u32 k = 0; k < shards; ++k) {
            copy_bytes(Warp{}, arena.peer((own + k) % shards * TENSOR_RANKS + tensor_rank, to), from, bytes);
        }
    });
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
GATHER_SHARDS = DeclaredKernel(
    "gather_shards", GATHER, epochs=Epochs(), flags=Flags(), gate_up=Buffer(), down=Buffer(), w1=Pointer("const char*"),
    w2=Pointer("const char*"), w3=Pointer("const char*"), rows=U32, inner=U32, row_bytes=U32, inner_bytes=U32,
)  # fmt: skip

ACTIVATE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    activate(const __grid_constant__ Arena arena, const __grid_constant__ Activate args) {
    each_row(args.rows, [&](u32 row) {
        each_column(args.inner, [&](u32 column) {
            float gate[row_lanes], up[row_lanes];
            RowOf<ELEMENT>(args.gate_up, 2 * row, args.inner).load(column, gate);
            RowOf<ELEMENT>(args.gate_up, 2 * row + 1, args.inner).load(column, up);
            for (int e = 0; e < row_lanes; ++e) up[e] *= gate[e] / (1.0f + expf(-gate[e]));
            RowOf<ELEMENT>(args.out, row, args.inner).store(column, up);
        });
    });
}
"""
ACTIVATED = DeclaredKernel("activate", ACTIVATE, gate_up=Pointer("const char*"), out=Pointer(), rows=U32, inner=U32)

SUM = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes;

// A rank owns a part of its group's result. Terms and sums lie in one of two buffers by the launch's parity: a rank that has finished
// a launch knows that all have begun it.
extern "C" __global__ void __launch_bounds__(512)
    tensor_sum(const __grid_constant__ Arena arena, const __grid_constant__ TensorSum args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u32 own = arena.rank % TENSOR_RANKS, base = arena.rank - own;
    const u64 terms = args.memory + (epoch & 1) * (TENSOR_RANKS + 1) * args.stride, sums = terms + TENSOR_RANKS * args.stride;
    const auto eight = [](const char* array, u64 i, u32 some) { return RowOf<ELEMENT>(array + i * row_lanes * bytes, 0, some); };
    // use(number in the part, number in all, elements) for eights of the part of rank `of`; the same block takes them on every rank.
    const auto each_eight = [&](u32 of, const auto& use) {
        const Part part = part_of((args.count + row_lanes - 1) / row_lanes, of, TENSOR_RANKS);
        for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; part.first + i < part.end; i += u64(gridDim.x) * blockDim.x) {
            use(i, part.first + i, u32(min(args.count - (part.first + i) * row_lanes, u64(row_lanes))));
        }
    };
    for (u32 k = 1; k < TENSOR_RANKS; ++k) {
        const u32 q = (own + k) % TENSOR_RANKS;
        each_eight(q, [&](u64 i, u64 at, u32 some) {
            float value[row_lanes];
            eight(args.x, at, some).load(0, value);
            eight(arena.peer(base + q, terms + own * args.stride), i, some).store(0, value);
        });
    }
    peers.barrier(blockIdx.x, 2 * epoch);
    each_eight(own, [&](u64 i, u64 at, u32 some) {
        float total[row_lanes], term[row_lanes];
        for (u32 q = 0; q < TENSOR_RANKS; ++q) {
            (q == own ? eight(args.x, at, some) : eight(arena.local(terms + q * args.stride), i, some)).load(0, term);
            for (int e = 0; e < row_lanes; ++e) total[e] = q == 0 ? term[e] : total[e] + term[e];
        }
        eight(arena.local(sums), i, some).store(0, total);
        eight(args.y, at, some).store(0, total);
    });
    peers.barrier(blockIdx.x, 2 * epoch + 1);
    for (u32 k = 1; k < TENSOR_RANKS; ++k) {
        const u32 q = (own + k) % TENSOR_RANKS;
        each_eight(q, [&](u64 i, u64 at, u32 some) {
            float value[row_lanes];
            eight(arena.peer(base + q, sums), i, some).load(0, value);
            eight(args.y, at, some).store(0, value);
        });
    }
}
"""
TENSOR_SUM = DeclaredKernel(
    "tensor_sum", SUM, epochs=Epochs(), flags=Flags(), memory=Buffer(), x=Pointer("const char*"), y=Pointer(), count=U64, stride=U64,
)  # fmt: skip
THREADS = 512


@per_group
def gather_shards(group: Group, rows: int, inner: int, n_tp: int, dtype: torch.dtype) -> tuple[BoundKernel, torch.Tensor, torch.Tensor]:
    """Gathers shards (rows, inner), twice, and (inner, rows) into (D, 2 inner) and (inner, D)."""
    width, size = rows * group.world_size // n_tp, dtype.itemsize
    grid = min(group.sm_count, 2 * rows + inner)
    sizes = {"flags": 1 + grid, "gate_up": 2 * width * inner * size, "down": width * inner * size}
    bound = GATHER_SHARDS.bind(
        group, grid=grid, block=min(THREADS, group.max_threads), defines={"TENSOR_RANKS": n_tp}, sizes=sizes, rows=rows, inner=inner,
        row_bytes=rows * size, inner_bytes=inner * size,
    )  # fmt: skip
    return bound, bound.tensor("gate_up", (width, 2 * inner), dtype), bound.tensor("down", (inner, width), dtype)


@per_group
def activate(group: Group, dtype: torch.dtype) -> BoundKernel:
    return ACTIVATED.bind(
        group, grid=2 * group.sm_count, block=min(THREADS, group.max_threads), defines={"ELEMENT": element_type(dtype)}, sizes={}
    )


@per_group
def tensor_sum(group: Group, room: int, n_tp: int, dtype: torch.dtype) -> BoundKernel:
    """Makes the launch that sums up to ``room`` elements over every ``n_tp`` neighbouring ranks."""
    grid, stride = group.sm_count, -(-room // (8 * n_tp)) * 8 * dtype.itemsize
    return TENSOR_SUM.bind(
        group, grid=grid, block=min(THREADS, group.max_threads), defines={"ELEMENT": element_type(dtype), "TENSOR_RANKS": n_tp},
        sizes={"flags": grid, "memory": 2 * (n_tp + 1) * stride}, stride=stride,
    )  # fmt: skip


@torch.no_grad()
def solution(
    x_local: torch.Tensor, W1_shard: torch.Tensor, W2_shard: torch.Tensor, W3_shard: torch.Tensor, n_tp: int, n_fsdp: int
) -> torch.Tensor:
    group, (tokens, width), (rows, inner) = group_of(), x_local.shape, W1_shard.shape
    if n_tp * n_fsdp != group.world_size:
        raise ValueError(f"got a grid of {n_tp} x {n_fsdp} on {group.world_size} ranks: expected as many ranks as places")
    if n_fsdp > 1:
        gather, gate_up_weights, down_weights = gather_shards(group, rows, inner, n_tp, x_local.dtype)
        gather(w1=W1_shard.contiguous(), w2=W2_shard.contiguous(), w3=W3_shard.contiguous())
        gate_up = x_local @ gate_up_weights
    else:
        gate_up, down_weights = x_local.new_empty((tokens, 2 * inner)), W3_shard
        torch.mm(x_local, W1_shard, out=gate_up[:, :inner])
        torch.mm(x_local, W2_shard, out=gate_up[:, inner:])
    hidden = x_local.new_empty((tokens, inner))
    activate(group, x_local.dtype)(gate_up=gate_up, out=hidden, rows=tokens, inner=inner)
    partial = hidden @ down_weights
    if n_tp == 1:
        return partial
    if n_fsdp == 1:
        communicator(group).all_reduce(partial)
        return partial
    result = torch.empty_like(partial)
    tensor_sum(group, room_for(group, tokens) * width, n_tp, partial.dtype)(x=partial, y=result, count=partial.numel())
    return result
