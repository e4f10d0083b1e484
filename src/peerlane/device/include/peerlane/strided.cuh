// Pushes of n-dimensional blocks: runs of equal length, as far apart at the target as the target's layout wants them.
#pragma once

#include <peerlane/comm.cuh>

namespace peerlane {

// A block that a rank sends to each: runs of `units` units, numbered by three indices, outermost first. Distances are in units.
// Mirrors `peerlane.device.strided.StridedBlock`.
struct StridedBlock {
    u64 from[3], to[3];      // from one index to the next, in the source and in the target
    u64 for_rank, of_rank;   // from what is for a rank to what is for the next one; from what comes of a rank to what comes of the next
    u32 count[3], units;     // fewer than 2^32 units together
};

// All threads of the grid copy the block from local memory to a target, which may be a peer's; several units of a thread are on their way at a
// time. Orders nothing: a signal or barrier of every block that has copied comes behind it, and what lay at the target is free before it.
template <class Unit>
__device__ inline void push_strided(Unit* target, const Unit* source, const StridedBlock& block) {
    constexpr int at_once = 4;
    const u32 total = block.count[0] * block.count[1] * block.count[2] * block.units, step = gridDim.x * blockDim.x;
    for (u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += at_once * step) {
        Unit value[at_once];
        u64 at[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const u32 i = first + k * step;
            if (i < first || i >= total) break;  // the first: the sum has wrapped
            u32 run = i / block.units;
            u64 from = at[k] = i % block.units;
#pragma unroll
            for (int axis = 2; axis >= 0; --axis) {
                const u32 index = run % block.count[axis];
                run /= block.count[axis];
                from += index * block.from[axis], at[k] += index * block.to[axis];
            }
            value[k] = source[from];
        }
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const u32 i = first + k * step;
            if (i >= first && i < total) target[at[k]] = value[k];
        }
    }
}

// The exchange of such blocks among all ranks: rank r's block for rank q goes to `out` of q's arena. A rank pushes to a peer when that has
// begun the same launch: its stream has then done what read the result of the launch before. `slots` flags: 1 + gridDim.x. All ranks launch
// one grid, also those that have nothing to send. Behind it every block of every rank has stored, and the results may be read.
template <int W, class Unit>
__device__ inline void exchange_strided(const Peers<W>& peers, const Arena& arena, u64 out, const Unit* source, const StridedBlock& block, u32 epoch) {
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    for (int k = 0; k < W; ++k) {
        const int q = rank_after<W>(arena.rank, k);
        if (k > 0) peers.wait(q, 0, epoch);
        push_strided(reinterpret_cast<Unit*>(arena.peer(q, out)) + arena.rank * block.of_rank, source + q * block.for_rank, block);
    }
    peers.barrier(1 + blockIdx.x, epoch);
}

}  // namespace peerlane
