// Sum of a tensor of some megabytes over all ranks, in two trips by ordinary stores: 2 (W - 1) / W of its bytes leave a rank, without the third more
// that packets carry for their epochs. Correct for any size.
//
// Every block has a chunk of every share, in some rounds. It stores the chunks of other ranks' shares at their owners, adds those that it owns and
// stores the sums at all ranks, and copies sums that have come to `out`; behind each store a signal for the block of its number. A round's stores
// go out before the block waits for the round before, so links are busy while sums are taken and copied. Whoever waits has sent before, and
// stores wait for nobody: so all waits end if all blocks are resident.
//
// One buffer of each kind will do. Whoever ends a launch has had sums of every block of every owner, which had read their terms: so terms may be
// written again. Whoever stores sums has had terms of this launch from the block of its number at the target, which hence began this launch, and
// ended the one before with all its copies. These may be launches of other sizes and grids.
//
// Terms are added in rank order in fp32 and rounded once, by one rank for each element: all ranks have the same bits.
//
// `in` and `out` are local and may be the same. `bytes`, less than 32 GiB, is a multiple of the element size and the same on all ranks, as is the grid.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

constexpr u32 staged_chunk_bytes = rings.tile_bytes / 2;  // of a share, a block and a round: enough for a signal not to count
constexpr u32 most_staged_rounds = 8;

// `space` has terms in `sums.tiles`, a share of every source, and sums in `copies.tiles`, a share of every owner; of both the flags.
template <class E, int W>
__device__ inline void all_reduce_staged(const Arena& arena, const CollectiveWorkspace& space, const char* in, char* out, u64 bytes) {
    using Words = u32[4];
    const int rank = arena.rank;
    const u32 vectors = static_cast<u32>((bytes + sizeof(Vec16) - 1) / sizeof(Vec16)), share = (vectors + W - 1) / W;
    const u32 wanted = share / (gridDim.x * (staged_chunk_bytes / sizeof(Vec16)));
    const u32 rounds = wanted < 1 ? 1 : wanted < most_staged_rounds ? wanted : most_staged_rounds;
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)), rounds);
    const Peers<W> terms(arena, space.sums.flags), totals(arena, space.copies.flags);
    // use(v) for this thread's vectors of this block's chunk of a share; shares are of one length, and behind the tensor lies nothing.
    const auto each_of_chunk = [&](u32 round, const auto& use) {
        const Part part = part_of(share, round * gridDim.x + blockIdx.x, rounds * gridDim.x);
        for (u32 v = static_cast<u32>(part.first) + threadIdx.x; v < part.end; v += blockDim.x) use(v);
    };
    const auto term_at = [&](int source, u32 v) { return space.sums.tiles + u64(source * share + v) * sizeof(Vec16); };
    const auto total_at = [&](int owner, u32 v) { return space.copies.tiles + u64(owner * share + v) * sizeof(Vec16); };
    const auto in_bytes = [&](int owner, u32 v) { return u64(owner * share + v) * sizeof(Vec16); };
    const auto exists = [&](int owner, u32 v) { return owner * share + v < vectors; };
    const auto put = [&](char* place, const Words& words) { *reinterpret_cast<Vec16*>(place) = Vec16{{words[0], words[1], words[2], words[3]}}; };
    const auto get = [&](u64 offset, Words& words) {
        const Vec16 whole = *reinterpret_cast<const Vec16*>(arena.local(offset));
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = whole.word[w];
    };

    const auto send_terms = [&](u32 round) {
        each_of_chunk(round, [&](u32 v) {
            Words words[W];
#pragma unroll
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(rank, k);
                if (exists(q, v)) load_words(in, in_bytes(q, v), bytes, words[k]);
            }
#pragma unroll
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(rank, k);
                if (exists(q, v)) put(arena.peer(q, term_at(rank, v)), words[k]);
            }
        });
        terms.signal_all(blockIdx.x, epoch + round);
    };
    const auto send_totals = [&](u32 round) {
        terms.wait_all(blockIdx.x, epoch + round);
        each_of_chunk(round, [&](u32 v) {
            if (!exists(rank, v)) return;
            Words mine, others[W], total;
            load_words(in, in_bytes(rank, v), bytes, mine);
#pragma unroll
            for (int q = 0; q < W; ++q) {
                if (q != rank) get(term_at(q, v), others[q]);
            }
            sum_in_rank_order<E, W>(rank, mine, others, total, space.factor);
            store_words(out, in_bytes(rank, v), bytes, total);
#pragma unroll
            for (int k = 1; k < W; ++k) put(arena.peer(rank_after<W>(rank, k), total_at(rank, v)), total);
        });
        totals.signal_all(blockIdx.x, epoch + round);
    };
    const auto take_totals = [&](u32 round) {
        totals.wait_all(blockIdx.x, epoch + round);
        each_of_chunk(round, [&](u32 v) {
#pragma unroll
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(rank, k);
                Words total;
                if (!exists(q, v)) continue;
                get(total_at(q, v), total);
                store_words(out, in_bytes(q, v), bytes, total);
            }
        });
    };

    send_terms(0);
#pragma unroll 1
    for (u32 round = 0; round < rounds; ++round) {
        if (round + 1 < rounds) send_terms(round + 1);
        send_totals(round);
        if (round > 0) take_totals(round - 1);
    }
    take_totals(rounds - 1);
}

}  // namespace peerlane
