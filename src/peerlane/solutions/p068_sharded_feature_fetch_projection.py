"""Problem 68, rows of a sharded table, projected: one launch sends ids to all ranks, and owners store the rows where they are wanted.

One question to the device tells how many rows every rank wants, for the size of the arena. Nothing is sorted. Bound by that question, and
at large sizes by the links, which carry four bytes of an id to each rank and the row. The product is torch's."""

import torch
import torch.distributed as dist

from peerlane.device import U32, U64, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, array, group_of, per_group
from peerlane.device.collectives.counts import share_counts

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// Block b of every rank pushes its part of the ids, and answers what block b of the others has pushed. A rank that has pushed ids has used
// the rows of the launch before.
extern "C" __global__ void __launch_bounds__(512) fetch_rows(const __grid_constant__ Arena arena, const __grid_constant__ FetchRows args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const Part own = part_of(args.wanted[arena.rank], blockIdx.x, gridDim.x);
    for (u64 i = own.first + threadIdx.x; i < own.end; i += blockDim.x) {
        const WIRE id = static_cast<WIRE>(args.ids[i]);
        for (int k = 0; k < WORLD_SIZE; ++k) {
            const int q = rank_after<WORLD_SIZE>(arena.rank, k);
            reinterpret_cast<WIRE*>(arena.peer(q, args.asked))[arena.rank * args.capacity + i] = id;
        }
    }
    peers.barrier(blockIdx.x, 2 * epoch);
    const u64 first = args.rows_of_rank * arena.rank, end = arena.rank == WORLD_SIZE - 1 ? ~u64(0) : first + args.rows_of_rank;
    const bool vectors = (reinterpret_cast<u64>(args.shard) | args.row_bytes) % sizeof(Vec16) == 0;
    for (int k = 1; k <= WORLD_SIZE && all_arrived(arena); ++k) {  // its own rows last, while others travel
        const int q = rank_after<WORLD_SIZE>(arena.rank, k % WORLD_SIZE);
        const WIRE* asked = reinterpret_cast<const WIRE*>(arena.local(args.asked)) + q * args.capacity;
        const Part part = part_of(args.wanted[q], blockIdx.x, gridDim.x);
        const auto row_of = [&](u32 i) {
            const u64 id = asked[part.first + i];
            return first <= id && id < end ? args.shard + (id - first) * args.row_bytes : nullptr;
        };
        copy_rows(Share{threadIdx.x, blockDim.x}, u32(part.end - part.first), u32(args.row_bytes), vectors, row_of,
                  [&](u32 i) { return arena.peer(q, args.rows) + (part.first + i) * args.row_bytes; });
    }
    peers.barrier(blockIdx.x, 2 * epoch + 1);
}
"""
FETCH_ROWS = DeclaredKernel(
    "fetch_rows", SOURCE, epochs=Epochs(), flags=Flags(), asked=Buffer(), rows=Buffer(), ids=Pointer("const ID*"),
    shard=Pointer("const char*"), rows_of_rank=U64, row_bytes=U64, capacity=U64, wanted=array(U32, 8),
)  # fmt: skip


@per_group
def fetch_rows(group: Group, capacity: int, ids: torch.dtype, wire: int, row_bytes: int) -> BoundKernel:
    return FETCH_ROWS.bind(
        group,
        grid=group.sm_count,
        block=min(512, group.max_threads),
        defines={"ID": "int" if ids == torch.int32 else "long long", "WIRE": f"u{8 * wire}"},
        sizes={"flags": group.sm_count, "asked": wire * capacity * group.world_size, "rows": capacity * row_bytes},
        capacity=capacity,
        row_bytes=row_bytes,
    )


def solution(
    local_embedding_shard: torch.Tensor,
    input_node_ids: torch.Tensor,
    proj_matrix: torch.Tensor,
    num_total_nodes: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks, (wanted, width) = group_of(group), (input_node_ids.numel(), local_embedding_shard.shape[1])
    counts = [count for (count,) in share_counts(ranks, [wanted])]
    # Arenas grow by powers of two, on all ranks alike.
    capacity, wire = 1 << max(counts).bit_length(), 4 if num_total_nodes < 1 << 32 else 8
    launch = fetch_rows(ranks, capacity, input_node_ids.dtype, wire, width * local_embedding_shard.itemsize)
    launch(
        ids=input_node_ids.contiguous(),
        shard=local_embedding_shard.contiguous(),
        rows_of_rank=-(-num_total_nodes // ranks.world_size),
        wanted=counts,
    )
    return launch.tensor("rows", (wanted, width), local_embedding_shard.dtype) @ proj_matrix
