"""Problem 69, ranks of positive edges among their negatives: one kernel ranks a row and stores eight bytes on all ranks, where they belong.

Hosts tell each other how many edges every rank has, and wait for no device. Bound by the host, and at large sizes by HBM, which reads the
scores once; the reference writes sigmoids and masks, and gathers padded ranks."""

import torch
import torch.distributed as dist

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
    array,
    element_type,
    group_of,
    per_group,
)
from peerlane.device.host.group import MAX_RANKS

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

__device__ float rounded_sigmoid(float x) {
    const float value[ELEMENT::lanes] = {1.0f / (1.0f + expf(-x))};
    float rounded[ELEMENT::lanes];
    ELEMENT::widen(ELEMENT::narrow(value), rounded);
    return rounded[0];
}

// A row is a warp's, or, if rows are long, a block's. Blocks of one number have a stretch of every rank's rows, so that they wait for each
// other alone. Ranks from others come to one of two buffers: what this rank still has to take of the launch before lies in the other one.
extern "C" __global__ void __launch_bounds__(1024)
    rank_scores(const __grid_constant__ Arena arena, const __grid_constant__ RankScores args) {
    __shared__ u32 scratch[32];
    __shared__ u64 first[WORLD_SIZE];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u64 came = args.came + (epoch & 1) * args.capacity * sizeof(u64);
    for (u32 q = threadIdx.x; q < WORLD_SIZE; q += blockDim.x) {
        first[q] = 0;
        for (u32 r = 0; r < q; ++r) first[q] += args.rows[r];
    }
    __syncthreads();
    const auto part_of_rank = [&](u32 q) { return part_of(args.rows[q], blockIdx.x, gridDim.x); };
    const u32 team = LONG_ROWS ? 0 : threadIdx.x / warp_threads, teams = LONG_ROWS ? 1 : blockDim.x / warp_threads;
    const u32 thread = LONG_ROWS ? threadIdx.x : Warp{}.thread(), threads = LONG_ROWS ? blockDim.x : warp_threads;
    for (u64 row = part_of_rank(arena.rank).first + team; row < part_of_rank(arena.rank).end; row += teams) {
        const float positive = element_of<ELEMENT>(args.positive, row), own = rounded_sigmoid(positive);
        u32 above = 0;
        for (u32 column = thread * row_lanes; column < args.negatives; column += threads * row_lanes) {
            float score[row_lanes];
            RowOf<ELEMENT>(args.negative, row, args.negatives).load(column, score);
            for (int e = 0; e < row_lanes; ++e) {
                if (column + e >= args.negatives) continue;
                // Equal scores are never above one another, whatever their sigmoids.
                const bool higher = score[e] > positive && rounded_sigmoid(score[e]) > own;
                above += higher || (score[e] != score[e] && positive == positive);
            }
        }
        const auto add = [](u32 a, u32 b) { return a + b; };
        above = LONG_ROWS ? block_reduce(above, add, scratch) : warp_reduce(above, add);
        if (thread < WORLD_SIZE) {
            u64* to = thread == arena.rank ? args.out : reinterpret_cast<u64*>(arena.peer(thread, came));
            to[first[arena.rank] + row] = above + 1;
        }
    }
    peers.barrier(blockIdx.x, epoch);
    const u64* others = reinterpret_cast<const u64*>(arena.local(came));
    for (u32 q = 0; q < WORLD_SIZE; ++q) {
        if (q == arena.rank) continue;
        const Part part = part_of_rank(q);
        for (u64 i = first[q] + part.first + threadIdx.x; i < first[q] + part.end; i += blockDim.x) args.out[i] = others[i];
    }
}
"""
RANK_SCORES = DeclaredKernel(
    "rank_scores", SOURCE, epochs=Epochs(), flags=Flags(), came=Buffer(), positive=Pointer("const char*"), negative=Pointer("const char*"),
    out=Pointer("u64*"), rows=array(U32, MAX_RANKS), capacity=U64, negatives=U32,
)  # fmt: skip
WARP_COLUMNS = 4096


@per_group
def rank_scores(group: Group, capacity: int, negatives: int, dtype: torch.dtype) -> BoundKernel:
    return RANK_SCORES.bind(
        group,
        grid=group.sm_count,
        block=min(1024, group.max_threads),
        defines={"ELEMENT": element_type(dtype), "LONG_ROWS": int(negatives > WARP_COLUMNS)},
        sizes={"flags": group.sm_count, "came": 16 * capacity},
        resident=True,
        capacity=capacity,
        negatives=negatives,
    )


def solution(local_pos_scores: torch.Tensor, local_neg_scores: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, (rows, negatives) = group_of(group), local_neg_scores.shape
    counts = ranks.agree(rows)
    out = torch.empty(sum(counts), dtype=torch.int64, device=local_pos_scores.device)
    # Arenas grow by powers of two, on all ranks alike.
    launch = rank_scores(ranks, 1 << out.numel().bit_length(), negatives, local_pos_scores.dtype)
    given = {"positive": local_pos_scores.contiguous(), "negative": local_neg_scores.contiguous()}
    launch(**given, out=out, rows=counts + [0] * (MAX_RANKS - ranks.world_size))
    return out
