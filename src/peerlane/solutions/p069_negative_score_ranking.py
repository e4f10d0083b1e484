"""Problem 69, ranks of positive edges among their negatives: one kernel ranks a row and stores eight bytes on all ranks, where they belong.

One question to the device tells how many edges every rank has. Bound by that question, since the result's shape follows from it, and at
large sizes by HBM, which reads the scores once; the reference writes sigmoids and masks, and gathers padded ranks."""

import torch
import torch.distributed as dist

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group
from peerlane.device.collectives.counts import share_counts

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

__device__ float rounded_sigmoid(float x) {
    const float value[ELEMENT::lanes] = {1.0f / (1.0f + expf(-x))};
    float rounded[ELEMENT::lanes];
    ELEMENT::widen(ELEMENT::narrow(value), rounded);
    return rounded[0];
}

// A row is a warp's, or, if rows are long, a block's.
extern "C" __global__ void __launch_bounds__(256)
    rank_scores(const __grid_constant__ Arena arena, const __grid_constant__ RankScores args) {
    __shared__ u32 scratch[32];
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    // Counts have been shared since the callers of all ranks read the result before: it may be overwritten.
    const u32 team = LONG_ROWS ? 0 : threadIdx.x / warp_threads, teams = LONG_ROWS ? 1 : blockDim.x / warp_threads;
    const u32 thread = LONG_ROWS ? threadIdx.x : Warp{}.thread(), threads = LONG_ROWS ? blockDim.x : warp_threads;
    for (u32 row = team * gridDim.x + blockIdx.x; row < args.rows; row += gridDim.x * teams) {
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
        if (thread < WORLD_SIZE) reinterpret_cast<u64*>(arena.peer(thread, args.out))[args.first + row] = above + 1;
    }
    peers.barrier(blockIdx.x, epoch);
}
"""
RANK_SCORES = DeclaredKernel(
    "rank_scores", SOURCE, epochs=Epochs(), flags=Flags(), out=Buffer(), positive=Pointer("const char*"), negative=Pointer("const char*"),
    first=U64, rows=U32, negatives=U32,
)  # fmt: skip
WARP_COLUMNS = 4096


@per_group
def rank_scores(group: Group, capacity: int, negatives: int, dtype: torch.dtype) -> BoundKernel:
    return RANK_SCORES.bind(
        group,
        grid=group.sm_count,
        block=min(256, group.max_threads),
        defines={"ELEMENT": element_type(dtype), "LONG_ROWS": int(negatives > WARP_COLUMNS)},
        sizes={"flags": group.sm_count, "out": 8 * capacity},
        negatives=negatives,
    )


def solution(local_pos_scores: torch.Tensor, local_neg_scores: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    ranks, (rows, negatives) = group_of(group), local_neg_scores.shape
    counts = [count for (count,) in share_counts(ranks, [rows])]
    # Arenas grow by powers of two, on all ranks alike.
    launch = rank_scores(ranks, 1 << sum(counts).bit_length(), negatives, local_pos_scores.dtype)
    launch(positive=local_pos_scores.contiguous(), negative=local_neg_scores.contiguous(), first=sum(counts[: ranks.rank]), rows=rows)
    return launch.tensor("out", (sum(counts),), torch.int64).clone()  # eight bytes of each row of scores
