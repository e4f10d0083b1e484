"""Problem 79, neighbours in sharded features: one launch takes each shard's best and their labels to the query's candidates.

One question to the device tells how many queries every rank has, and one launch gathers them. Products and selections are torch's; only
the last selection sorts. Bound by that question, and at large sizes by the product and the selection, which reads all similarities."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist

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
    communicator,
    group_of,
    per_group,
)
from peerlane.device.collectives.counts import share_counts

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// A warp takes a query. Places are free: a rank that has shared its number of queries has used what the launch before brought.
extern "C" __global__ void __launch_bounds__(512)
    return_best(const __grid_constant__ Arena arena, const __grid_constant__ ReturnBest args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    each_row(args.ends[WORLD_SIZE - 1], [&](u32 row) {
        u32 q = 0;
        while (row >= args.ends[q]) ++q;
        const u64 to = (u64(row - (q == 0 ? 0 : args.ends[q - 1])) * WORLD_SIZE + arena.rank) * args.k, from = u64(row) * args.k;
        BITS* values = reinterpret_cast<BITS*>(arena.peer(q, args.found)) + to;
        long long* labels = reinterpret_cast<long long*>(arena.peer(q, args.found_labels)) + to;
        for (u32 i = Warp{}.thread(); i < args.k; i += warp_threads) {
            values[i] = args.values[from + i];
            labels[i] = args.labels[args.indices[from + i]];
        }
    });
    Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);
}
"""
RETURN_BEST = DeclaredKernel(
    "return_best", SOURCE, epochs=Epochs(), flags=Flags(), found=Buffer(), found_labels=Buffer(), values=Pointer("const BITS*"),
    indices=Pointer("const long long*"), labels=Pointer("const long long*"), k=U32, ends=array(U32, 8),
)  # fmt: skip


@per_group
def return_best(group: Group, capacity: int, max_k: int, itemsize: int) -> BoundKernel:
    candidates = capacity * group.world_size * max_k
    return RETURN_BEST.bind(
        group,
        grid=group.sm_count,
        block=min(512, group.max_threads),
        defines={"BITS": f"u{8 * itemsize}"},
        sizes={"flags": group.sm_count, "found": candidates * itemsize, "found_labels": 8 * candidates},
        k=max_k,
    )


def solution(
    test_features_rank: torch.Tensor,
    train_features_rank_T: torch.Tensor,
    train_labels_rank: torch.Tensor,
    max_k: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if max_k > train_features_rank_T.shape[1]:
        raise ValueError(f"max_k is {max_k}, and the shard has {train_features_rank_T.shape[1]} rows: expected no more than the shard has")
    ranks, (own, depth), size = group_of(group), test_features_rank.shape, test_features_rank.itemsize
    counts = [count for (count,) in share_counts(ranks, [own])]
    ends, row_bytes = list(accumulate(counts)), depth * size
    queries = test_features_rank.new_empty((ends[-1], depth))
    if ends[-1]:
        places = [((end - count) * row_bytes, count * row_bytes) for count, end in zip(counts, ends, strict=True)]
        communicator(ranks).exchange(queries, test_features_rank.contiguous(), [(0, own * row_bytes)] * ranks.world_size, places)
    best = torch.topk(queries @ train_features_rank_T, max_k, dim=1, sorted=False)
    # Arenas grow by powers of two, on all ranks alike.
    launch = return_best(ranks, 1 << max(counts).bit_length(), max_k, size)
    labels = train_labels_rank.to(torch.int64).contiguous()
    launch(values=best.values.contiguous(), indices=best.indices.contiguous(), labels=labels, ends=ends)
    candidates = own, ranks.world_size * max_k
    nearest = torch.topk(launch.tensor("found", candidates, best.values.dtype), max_k, dim=1)
    return nearest.values, launch.tensor("found_labels", candidates, torch.int64).gather(1, nearest.indices)
