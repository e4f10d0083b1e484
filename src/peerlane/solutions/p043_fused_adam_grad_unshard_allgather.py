"""Problem 43, Adam on a shard and an all-gather: one kernel stores every new parameter where it belongs in all ranks' results.

Bound by HBM at large sizes: gradient, parameter and both moments are read once, results are written W times. Small shards are bound by
the launch and two trips of a flag: peers have begun, peers have stored.

The next call overwrites the results, which lie in the arena."""

import math

import torch

from peerlane.device import F32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

template <class E>
__device__ void load_part(const char* array, u64 i, u64 count, float (&value)[row_lanes]) {
    RowOf<E>(array + i * (4 / E::lanes), 0, u32(min(count - i, u64(row_lanes)))).load(0, value);
}

extern "C" __global__ void __launch_bounds__(512)
    adam_gather(const __grid_constant__ Arena arena, const __grid_constant__ AdamGather args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    peers.wait_all(0, epoch);  // their callers have read the results of the launch before
    constexpr int bytes = 4 / PARAMETER_TYPE::lanes;
    for (u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * row_lanes; i < args.count; i += u64(gridDim.x) * blockDim.x * row_lanes) {
        float g[row_lanes], w[row_lanes], m[row_lanes], v[row_lanes];
        load_part<GRADIENT_TYPE>(args.gradient, i, args.count, g);
        load_part<PARAMETER_TYPE>(args.parameter, i, args.count, w);
        load_part<FIRST_TYPE>(args.first, i, args.count, m);
        load_part<SECOND_TYPE>(args.second, i, args.count, v);
        for (int e = 0; e < row_lanes; ++e) {
            const float first = args.beta1 * m[e] + args.rest1 * g[e], second = args.beta2 * v[e] + args.rest2 * g[e] * g[e];
            w[e] -= args.step_size * first / (sqrtf(second / args.correction2) + args.eps);
        }
        for (int k = 0; k < WORLD_SIZE; ++k) {
            char* target = arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), args.out) + (arena.rank * args.count + i) * bytes;
            RowOf<PARAMETER_TYPE>(target, 0, u32(min(args.count - i, u64(row_lanes)))).store(0, w);
        }
    }
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
ADAM_GATHER = DeclaredKernel(
    "adam_gather", SOURCE, epochs=Epochs(), flags=Flags(), out=Buffer(), gradient=Pointer("const char*"), parameter=Pointer("const char*"),
    first=Pointer("const char*"), second=Pointer("const char*"), count=U64, beta1=F32, rest1=F32, beta2=F32, rest2=F32, step_size=F32,
    correction2=F32, eps=F32,
)  # fmt: skip
THREADS = 512


@per_group
def adam_gather(group: Group, count: int, dtypes: tuple[torch.dtype, ...]) -> tuple[BoundKernel, torch.Tensor]:
    types = zip(("GRADIENT_TYPE", "PARAMETER_TYPE", "FIRST_TYPE", "SECOND_TYPE"), map(element_type, dtypes), strict=True)
    block = min(THREADS, group.max_threads)
    grid = min(group.sm_count, math.ceil(count / (8 * block)))
    sizes = {"flags": 1 + grid, "out": group.world_size * count * dtypes[1].itemsize}
    bound = ADAM_GATHER.bind(group, grid=grid, block=block, defines=dict(types), sizes=sizes, count=count)
    return bound, bound.tensor("out", (group.world_size * count,), dtypes[1])


def solution(
    grad_shard: torch.Tensor,
    master_shard: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> torch.Tensor:
    tensors = [tensor.contiguous() for tensor in (grad_shard, master_shard, exp_avg, exp_avg_sq)]
    if not master_shard.numel():
        return master_shard.new_empty(0)
    launch, gathered = adam_gather(group_of(), master_shard.numel(), tuple(tensor.dtype for tensor in tensors))
    launch(
        **dict(zip(("gradient", "parameter", "first", "second"), tensors, strict=True)),
        beta1=beta1, rest1=1 - beta1, beta2=beta2, rest2=1 - beta2, step_size=lr / (1 - beta1**step), correction2=1 - beta2**step, eps=eps,
    )  # fmt: skip
    return gathered
