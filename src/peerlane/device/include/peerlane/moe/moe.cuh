// Rows of tokens on their way to experts of other ranks, and back: the dispatch and the combination of a mixture of experts.
//
// A routing map (experts, tokens) is nonzero where a token goes to an expert. Its nonzero entries, by expert and then token, are a rank's rows.
// Parts of them, in order, go to the ranks in order. What a rank gets it has by own expert, then source. Only it knows how many rows of each
// source are for which of its experts; it tells each source where they go.
//
// All blocks are resident, and launched alike on all ranks. Slots of the flags: 0: what a rank tells the others; then one for each block and
// barrier.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/rows.cuh>

namespace peerlane {

constexpr u32 max_own_experts = 1024;

// All blocks of this rank have come here; what they did before is seen behind it. `slots`: one for each block.
template <int W>
__device__ inline void meet_blocks(const Peers<W>& peers, const Arena& arena, u32 slots, u32 epoch) {
    peers.signal(arena.rank, slots + blockIdx.x, epoch);
    peers.wait_slots(arena.rank, slots, gridDim.x, epoch);
}

// The same of all blocks of all ranks.
template <int W>
__device__ inline void meet_ranks(const Peers<W>& peers, const Arena& arena, u32 slots, u32 epoch) {
    peers.signal_all(slots + blockIdx.x, epoch);
    peers.signal(arena.rank, slots + blockIdx.x, epoch);
    for (int k = 0; k < W; ++k) peers.wait_slots(rank_after<W>(arena.rank, k), slots, gridDim.x, epoch);
}

// The numbers of the rows. Block b counts experts b, b + grid, ...; `counts` (u32[experts]) is local memory.
template <class Map>
struct RowNumbers {
    const Map* map;
    u32 experts, tokens;
    u32* counts;

    // By all threads of all blocks.
    __device__ void count() const {
        __shared__ u32 scratch[32];
        for (u32 expert = blockIdx.x; expert < experts; expert += gridDim.x) {
            u32 own = 0;
            for (u32 token = threadIdx.x; token < tokens; token += blockDim.x) own += routed(expert, token);
            own = block_reduce(own, [](u32 a, u32 b) { return a + b; }, scratch);
            if (threadIdx.x == 0) counts[expert] = own;
        }
    }

    // use(expert, token, number) for the rows of the block's experts. When all blocks have counted.
    template <class Use>
    __device__ void each(const Use& use) const {
        __shared__ u32 scratch[32];
        const auto add = [](u32 a, u32 b) { return a + b; };
        for (u32 expert = blockIdx.x; expert < experts; expert += gridDim.x) {
            u32 before = 0;
            for (u32 other = threadIdx.x; other < expert; other += blockDim.x) before += counts[other];
            u32 first = block_reduce(before, add, scratch);
            for (u32 begin = 0; begin < tokens; begin += blockDim.x) {
                const u32 token = begin + threadIdx.x, warp = threadIdx.x / warp_threads;
                const bool is_row = token < tokens && routed(expert, token);
                const u32 rows = __ballot_sync(0xffffffffu, is_row);
                __syncthreads();
                if (Warp{}.thread() == 0) scratch[warp] = __popc(rows);
                __syncthreads();
                u32 number = first + __popc(rows & ((1u << Warp{}.thread()) - 1));
                for (u32 w = 0; w < blockDim.x / warp_threads; ++w) {
                    if (w < warp) number += scratch[w];
                    first += scratch[w];
                }
                if (is_row) use(expert, token, number);
            }
        }
    }

  private:
    __device__ bool routed(u32 expert, u32 token) const { return map[u64(expert) * tokens + token] != 0; }
};

// Of consecutive rows, those up to `end` (not including it) move by `shift`, in 32 bits that wrap.
struct Moved {
    u32 end, shift;
};

// The first of `count` entries whose end is behind `row`; `count` if there is none. By a warp.
__device__ inline u32 entry_of(const Moved* entries, u32 count, u32 row) {
    for (u32 first = 0; first < count; first += warp_threads) {
        const u32 i = first + Warp{}.thread();
        const u32 found = __ballot_sync(0xffffffffu, i < count && row < entries[i].end);
        if (found) return first + __ffs(found) - 1;
    }
    return count;
}

// The same by a thread.
__device__ inline u32 entry_with(const Moved* entries, u32 count, u32 row) {
    u32 first = 0, rest = count;
    while (rest > 0) {
        const u32 half = rest / 2;
        if (row < entries[first + half].end) {
            rest = half;
        } else {
            first += half + 1, rest -= half + 1;
        }
    }
    return first;
}

// Of rows by source and own expert, `lengths` (W, own): for one source and expert, where these rows begin among the source's, and where among all rows
// by expert and source. `totals` are sums over sources.
struct Chunk {
    u32 in_source, in_all, length;
};
template <int W>
__device__ inline Chunk chunk_of(const long long* lengths, const u32* totals, u32 own, u32 source, u32 expert) {
    Chunk chunk{0, 0, static_cast<u32>(lengths[source * own + expert])};
    for (u32 e = 0; e < expert; ++e) chunk.in_source += static_cast<u32>(lengths[source * own + e]), chunk.in_all += totals[e];
    for (u32 s = 0; s < source; ++s) chunk.in_all += static_cast<u32>(lengths[s * own + expert]);
    return chunk;
}

// use(source, expert, chunk) for every one, by the threads of one block.
template <int W, class Use>
__device__ inline void each_chunk(const long long* lengths, u32 own, const Use& use) {
    __shared__ u32 totals[max_own_experts];
    for (u32 e = threadIdx.x; e < own; e += blockDim.x) {
        totals[e] = 0;
        for (int s = 0; s < W; ++s) totals[e] += static_cast<u32>(lengths[s * own + e]);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < W * own; i += blockDim.x) use(i / own, i % own, chunk_of<W>(lengths, totals, own, i / own, i % own));
}

// Rank q's part is rows [start[q], start[q + 1]) of a rank's rows.
template <int W>
__device__ inline int part_with(const u32 (&start)[max_ranks + 1], u32 row) {
    int q = 0;
    while (q + 1 < W && row >= start[q + 1]) ++q;
    return q;
}

// use(i) for the rows of a token's list, whatever its order, in ascending order (32 at a time). By a warp.
template <class Use>
__device__ inline void each_of_list(const u32* next, u32 head, const Use& use) {
    while (head != ~0u) {
        u32 own = ~0u, count = 0;
        for (; head != ~0u && count < warp_threads; ++count) {
            if (count == Warp{}.thread()) own = head;
            head = next[head];
        }
        for (; count > 0; --count) {
            const u32 least = warp_reduce(own, [](u32 a, u32 b) { return a < b ? a : b; });
            if (own == least) own = ~0u;
            use(least);
        }
    }
}

}  // namespace peerlane
