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
template <int W, class Team>
__device__ inline void meet_blocks(const Peers<W, Team>& peers, const Arena& arena, u32 slots, u32 epoch) {
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

// Counts a block's stretch of items by owner, in `counts` (u32[blocks][W], local). By all threads of all blocks.
template <int W, class OwnerOf>
__device__ inline void count_owners(u32* counts, const Part& part, const OwnerOf& owner_of) {
    __shared__ u32 scratch[32];
    u32 own[W] = {};
    for (u64 i = part.first + threadIdx.x; i < part.end; i += blockDim.x) {
        const u32 owner = owner_of(i);
#pragma unroll
        for (u32 q = 0; q < W; ++q) own[q] += owner == q;
    }
#pragma unroll
    for (u32 q = 0; q < W; ++q) {
        const u32 sum = block_reduce(own[q], [](u32 a, u32 b) { return a + b; }, scratch);
        if (threadIdx.x == 0) counts[blockIdx.x * W + q] = sum;
    }
}

// use(owner, items of lower blocks, items of all blocks), by one thread for each owner, when all blocks have counted.
template <int W, class Use>
__device__ inline void each_owner(const u32* counts, const Use& use) {
    for (u32 q = threadIdx.x / warp_threads; q < W; q += blockDim.x / warp_threads) {
        u32 before = 0, all = 0;
        for (u32 b = Warp{}.thread(); b < gridDim.x; b += warp_threads) {
            const u32 count = counts[b * W + q];
            all += count, before += b < blockIdx.x ? count : 0;
        }
        before = warp_sum(before), all = warp_sum(all);
        if (Warp{}.thread() == 0) use(q, before, all);
    }
}

// The place of this thread's item among its owner's, of which `next`, in shared memory, says the next one free; owner W: no item. By a block.
template <int W>
__device__ inline u32 take_place(u32 owner, u32 (&next)[W]) {
    __shared__ u32 of_warps[W][32];
    const u32 warp = threadIdx.x / warp_threads;
    u32 place = 0;  // among the warp's items of this owner
#pragma unroll
    for (u32 q = 0; q < W; ++q) {
        const u32 lanes = __ballot_sync(full_warp, owner == q);
        if (owner == q) place = __popc(lanes & ((1u << Warp{}.thread()) - 1));
        if (Warp{}.thread() == 0) of_warps[q][warp] = __popc(lanes);
    }
    __syncthreads();
    if (owner < W) {
        place += next[owner];
        for (u32 w = 0; w < warp; ++w) place += of_warps[owner][w];
    }
    __syncthreads();
    if (threadIdx.x < W) {
        for (u32 w = 0; w < blockDim.x / warp_threads; ++w) next[threadIdx.x] += of_warps[threadIdx.x][w];
    }
    __syncthreads();
    return place;
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

    // use(expert, token, number) for the rows of the block's experts. When all blocks have counted. A warp finds the rows of a stretch of tokens; then
    // every thread has a row of its own.
    template <class Use>
    __device__ void each(const Use& use) const {
        constexpr u32 tokens_at_once = 4096;
        __shared__ u32 scratch[32];
        __shared__ u16 found[tokens_at_once];
        const u32 lane = Warp{}.thread(), warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;
        for (u32 expert = blockIdx.x; expert < experts; expert += gridDim.x) {
            u32 before = 0;
            for (u32 other = threadIdx.x; other < expert; other += blockDim.x) before += counts[other];
            u32 first = block_reduce(before, [](u32 a, u32 b) { return a + b; }, scratch);
            for (u32 begin = 0; begin < tokens; begin += tokens_at_once) {
                const u32 inside = min(tokens_at_once, tokens - begin), stretch = (inside + 32 * warps - 1) / (32 * warps) * 32;
                const u32 end = min(inside, (warp + 1) * stretch);
                const auto rows_at = [&](u32 i) { return __ballot_sync(full_warp, i + lane < end && routed(expert, begin + i + lane)); };
                u32 own = 0, rows = 0;
#pragma unroll 4
                for (u32 i = warp * stretch; i < end; i += warp_threads) own += __popc(rows_at(i));
                __syncthreads();
                if (lane == 0) scratch[warp] = own;
                __syncthreads();
                own = 0;
                for (u32 w = 0; w < warps; ++w) own += w < warp ? scratch[w] : 0, rows += scratch[w];
                for (u32 i = warp * stretch; i < end; i += warp_threads) {
                    const u32 here = rows_at(i);
                    if (here >> lane & 1) found[own + __popc(here & ((1u << lane) - 1))] = static_cast<u16>(i + lane);
                    own += __popc(here);
                }
                __syncthreads();
                for (u32 i = threadIdx.x; i < rows; i += blockDim.x) use(expert, begin + found[i], first + i);
                first += rows;
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

// The first of `count` entries whose end is behind `row`; `count` if there is none.
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

// ---- lists of rows by token, and what becomes of them ---------------------------------------------------------------------------------------

// The rows of every token, in any order: the first 32 in its line of `lines`, further ones, of which there are seldom any, as a list.
struct RowList {
    u32 count, rest;
};
struct RowLists {
    RowList* of;
    u32 *lines, *next;

    __device__ void clear(u32 token) const { of[token] = {0, ~0u}; }
    __device__ void add(u32 token, u32 row) const {
        const u32 place = atomicAdd(&of[token].count, 1u);
        if (place < warp_threads) lines[token * warp_threads + place] = row;
        else next[row] = atomicExch(&of[token].rest, row);
    }
};

// A token's rows as a warp holds them: lane l has row number l, of `count`, in ascending order.
struct ListedRows {
    u32 row = ~0u, count, rest;

    __device__ ListedRows(const RowLists& lists, u32 token) : rest(lists.of[token].rest) {
        const u32 lane = Warp{}.thread(), all = lists.of[token].count;
        count = min(all, warp_threads);
        const u32 own = lane < count ? lists.lines[token * warp_threads + lane] : ~0u;
        u32 place = 0;
        for (u32 i = 0; i < count; ++i) place += __shfl_sync(full_warp, own, i) < own;
        for (u32 i = 0; i < count; ++i) {
            const u32 other = __shfl_sync(full_warp, own, i), its = __shfl_sync(full_warp, place, i);
            if (its == lane) row = other;
        }
    }
};

// A row from `from` to each of a token's rows at `out`, by a warp. Every vector is loaded once, and several of a lane are on their way at a time.
__device__ inline void copy_to_rows(const char* from, char* out, u32 bytes, const RowLists& lists, u32 token) {
    constexpr u32 at_once = 4, step = warp_threads * sizeof(Vec16);
    const ListedRows list(lists, token);
    const bool vectors = aligned_for<Vec16>(from) && aligned_for<Vec16>(out) && bytes % sizeof(Vec16) == 0;
    const auto target = [&](u32 i) { return out + u64(__shfl_sync(full_warp, list.row, i)) * bytes; };
    for (u32 first = 0; first < bytes && vectors; first += at_once * step) {
        const u32 own = first + Warp{}.thread() * sizeof(Vec16);
        Vec16 vector[at_once];
#pragma unroll
        for (u32 v = 0; v < at_once; ++v) {
            if (own + v * step < bytes) vector[v] = *reinterpret_cast<const Vec16*>(from + own + v * step);
        }
        for (u32 i = 0; i < list.count; ++i) {
            char* to = target(i);
#pragma unroll
            for (u32 v = 0; v < at_once; ++v) {
                if (own + v * step < bytes) *reinterpret_cast<Vec16*>(to + own + v * step) = vector[v];
            }
        }
    }
    for (u32 i = 0; i < list.count && !vectors; ++i) copy_bytes(Warp{}, target(i), from, bytes);
    for (u32 more = list.rest; more != ~0u; more = lists.next[more]) copy_bytes(Warp{}, out + u64(more) * bytes, from, bytes);
}

// The sum of a token's rows, times weight(row), in fp32 and ascending order, by a warp: use(column_of, sums) in every lane, for some eights of columns
// that begin at column_of(i), also behind the end. Several rows are on their way at a time.
constexpr int eights_of_sums = 2;
template <class E, class Weight, class Use>
__device__ inline void sum_rows(const char* matrix, u32 columns, const RowLists& lists, u32 token, const Weight& weight, const Use& use) {
    constexpr int at_once = 4, wide = eights_of_sums;
    const ListedRows list(lists, token);
    const float own = Warp{}.thread() < list.count ? weight(list.row) : 0.0f;
    for (u32 first = 0; first < columns; first += wide * warp_threads * row_lanes) {
        const auto column_of = [&](int i) { return first + (i * warp_threads + Warp{}.thread()) * row_lanes; };
        float sum[wide][row_lanes] = {};
        const auto add_batch = [&](const u32 (&row)[at_once], const float (&factor)[at_once]) {
            float term[at_once * wide][row_lanes];
            const auto place = [&](int i, u32& its_row, u32& its_column) {
                its_row = row[0];
#pragma unroll
                for (int r = 1; r < at_once; ++r) its_row = i / wide == r ? row[r] : its_row;
                its_column = its_row == ~0u ? columns : column_of(i % wide);
            };
            load_together<E, at_once * wide>(matrix, columns, place, term);
#pragma unroll
            for (int i = 0; i < at_once * wide; ++i) {
                if (row[i / wide] == ~0u) continue;
#pragma unroll
                for (int e = 0; e < row_lanes; ++e) sum[i % wide][e] += factor[i / wide] * term[i][e];
            }
        };
        for (u32 begin = 0; begin < list.count; begin += at_once) {
            u32 row[at_once];
            float factor[at_once];
#pragma unroll
            for (u32 r = 0; r < at_once; ++r) {
                const u32 its = __shfl_sync(full_warp, list.row, begin + r);
                row[r] = begin + r < list.count ? its : ~0u, factor[r] = __shfl_sync(full_warp, own, begin + r);
            }
            add_batch(row, factor);
        }
        for (u32 more = list.rest; more != ~0u; more = lists.next[more]) add_batch({more, ~0u, ~0u, ~0u}, {weight(more)});
        use(column_of, sum);
    }
}

// ---- two teams of a block: one sends tokens away, in rounds, the other sees to what is here ----------------------------------------------------

// Warps of the block's first half, or of the rest. Block b of every rank has the same tokens in the same round, of `tokens` that all ranks count alike.
// Slots of the flags: one for each round and block.
constexpr u32 team_rounds = 4;
template <int W>
struct TokenTeam : Peers<W, Warps> {
    u32 tokens, slots, epoch;
    Warps warps;

    __device__ TokenTeam(const Arena& arena, u64 flags, bool sends, u32 its_tokens, u32 its_slots, u32 its_epoch)
        : TokenTeam(arena, flags, members(sends), its_tokens, its_slots, its_epoch) {}

    __device__ static bool caller_sends() { return threadIdx.x / warp_threads < blockDim.x / warp_threads / 2; }

    // use(token) for those of a round, by warps.
    template <class Use>
    __device__ void each(u32 round, const Use& use) const {
        const u32 of_block = (tokens + gridDim.x - 1) / gridDim.x, of_round = (of_block + team_rounds - 1) / team_rounds;
        for (u32 i = warps.thread() / warp_threads; i < of_round; i += warps.count) {
            const u32 token = (round * of_round + i) * gridDim.x + blockIdx.x;
            if (token < tokens) use(token);
        }
    }
    // What the round has sent is there; what others have sent in it is here.
    __device__ void tell(u32 round) const { this->signal_all(slots + round * gridDim.x + blockIdx.x, epoch); }
    __device__ void hear(u32 round) const { this->wait_all_slots(slots + round * gridDim.x + blockIdx.x, 1, epoch); }

  private:
    __device__ static Warps members(bool sends) {
        const u32 all = blockDim.x / warp_threads, half = all / 2;
        return sends ? Warps{0, half, 1} : Warps{half, all - half, 2};
    }
    __device__ TokenTeam(const Arena& arena, u64 flags, Warps its_warps, u32 its_tokens, u32 its_slots, u32 its_epoch)
        : Peers<W, Warps>(arena, flags, its_warps), tokens(its_tokens), slots(its_slots), epoch(its_epoch), warps(its_warps) {}
};

}  // namespace peerlane
