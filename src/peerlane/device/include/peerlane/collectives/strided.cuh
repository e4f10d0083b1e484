// Pushes of n-dimensional blocks: runs of equal length, as far apart at the target as the target's layout wants them.
#pragma once

#include <peerlane/comm.cuh>

namespace peerlane {

// A block that a rank sends to each: runs of `units` units, numbered by three indices, outermost first. Distances are in units.
// Mirrors `peerlane.device.collectives.strided.StridedBlock`.
struct StridedBlock {
    u64 from[3], to[3];      // from one index to the next, in the source and in the target
    u64 for_rank, of_rank;   // from what is for a rank to what is for the next one; from what comes of a rank to what comes of the next
    u32 count[3], units;     // fewer than 2^32 units together
};

// All threads of the grid copy `blocks` blocks of one shape from local memory to targets, which may be peers'. A unit's place is found once for
// all of them, and eight units of a thread are on their way at a time. Orders nothing: a signal or barrier of every block that has copied comes
// behind it, and what lay at the targets is free before it.
template <class Unit, int blocks>
__device__ inline void push_strided(Unit* const (&target)[blocks], const Unit* const (&source)[blocks], const StridedBlock& block) {
    constexpr int at_once = blocks >= 8 ? 1 : 8 / blocks;
    const u32 total = block.count[0] * block.count[1] * block.count[2] * block.units, step = gridDim.x * blockDim.x;
    for (u64 first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += u64(at_once) * step) {
        Unit value[at_once][blocks];
        u64 at[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + u64(i) * step >= total) break;
            const u32 unit = u32(first) + i * step;
            u32 run = unit / block.units;
            u64 from = at[i] = unit % block.units;
#pragma unroll
            for (int axis = 2; axis >= 0; --axis) {
                const u32 index = run % block.count[axis];
                run /= block.count[axis];
                from += index * block.from[axis], at[i] += index * block.to[axis];
            }
#pragma unroll
            for (int k = 0; k < blocks; ++k) value[i][k] = source[k][from];
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + u64(i) * step >= total) break;
#pragma unroll
            for (int k = 0; k < blocks; ++k) target[k][at[i]] = value[i][k];
        }
    }
}
template <class Unit>
__device__ inline void push_strided(Unit* target, const Unit* source, const StridedBlock& block) {
    Unit* const targets[1] = {target};
    const Unit* const sources[1] = {source};
    push_strided(targets, sources, block);
}

// The exchange of such blocks among all ranks: rank r's block for rank q goes to `out` of q's arena. A rank pushes when all others have begun
// the same launch: their streams have then done what read the result of the launch before. `slots` flags: 1 + gridDim.x. All ranks launch
// one grid, also those that have nothing to send. Behind it every block of every rank has stored, and the results may be read.
template <int W, class Unit>
__device__ inline void exchange_strided(const Peers<W>& peers, const Arena& arena, u64 out, const Unit* source, const StridedBlock& block, u32 epoch) {
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    peers.wait_all(0, epoch);
    Unit* targets[W];
    const Unit* sources[W];
#pragma unroll
    for (int k = 0; k < W; ++k) {
        const int q = rank_after<W>(arena.rank, k);
        targets[k] = reinterpret_cast<Unit*>(arena.peer(q, out)) + arena.rank * block.of_rank;
        sources[k] = source + q * block.for_rank;
    }
    push_strided<Unit, W>(targets, sources, block);
    peers.barrier(1 + blockIdx.x, epoch);
}

}  // namespace peerlane
