// A large tensor in two trips through rings of tiles, in one kernel, correct for any size. It is cut into shares, one per owner. Whoever
// gives sends each owner its share; owners sum what they got and send the sum to whoever takes. A route says who is what:
//
//   RelayAllReduce   all own, give and take                                       bytes per port: 2 (W - 1) / W of the tensor each way
//   RelayReduce      the root takes; the others own and keep                      once the tensor into the root's port, not W - 1 times
//   RelayBroadcast   the root gives and keeps; the others own and take            once the tensor out of the root's port
//
// Terms are added in rank order in fp32 and rounded once, by one rank for each element: all ranks have the same bits.
//
// `in` and `out` are local and may be the same. `bytes` is a multiple of the element size and the same on all ranks, as is the grid, of at
// most space.relay_blocks. All blocks are resident together.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// A route: `sums`, number of owners, share_of(rank) (-1 for who owns none), gives, takes, and keeps: who copies its own
// tensor to `out`.
template <int W>
struct RelayAllReduce {
    static constexpr bool sums = true;

    __device__ u32 owners() const { return W; }
    __device__ int share_of(int rank) const { return rank; }
    __device__ bool gives(int) const { return true; }
    __device__ bool takes(int) const { return true; }
    __device__ bool keeps(int) const { return false; }
};

// With two ranks the root sums: its port takes in the tensor either way, and one trip is shorter than two.
template <int W>
struct RelayReduce {
    static constexpr bool sums = true;
    int root;

    __device__ u32 owners() const { return W - 1; }
    __device__ int share_of(int rank) const {
        if constexpr (W == 2) return rank == root ? 0 : -1;
        return rank == root ? -1 : rank - (rank > root);
    }
    __device__ bool gives(int) const { return true; }
    __device__ bool takes(int rank) const { return rank == root; }
    __device__ bool keeps(int rank) const { return rank != root; }
};

template <int W>
struct RelayBroadcast {
    static constexpr bool sums = false;
    int root;

    __device__ u32 owners() const { return W - 1; }
    __device__ int share_of(int rank) const { return rank == root ? -1 : rank - (rank > root); }
    __device__ bool gives(int rank) const { return rank == root; }
    __device__ bool takes(int rank) const { return rank != root; }
    __device__ bool keeps(int rank) const { return rank == root; }
};

// Tiles go round a ring of `relay_depth` places per pair of ranks, block and direction; block b talks to the blocks b of the other ranks only.
// In step i a block sends the terms of tile i, sums tile i - 1 and sends the sum, takes in the sums of tile i - 2, and gives one signal. The
// link is at work meanwhile: the copy of step i - 2 runs while the stores of this step are on their way.
//
// No place is written before it was read, without any other signal. Having a rank's signal of step j means that it has read the terms of tile
// j - 1 and the sums of tile j - 2, whether or not its role in the route made it read any.
//   terms of tile i are sent with the signals of step i - 2 in hand: terms of tile i - 3 have been read;
//   sums of tile i - 1 are sent with the signals of step i - 1 in hand: sums of tile i - 3 have been read.
// Both are in time for a ring of four; three would do. A launch of n tiles has steps 0 to n + 1 and ends with the signals of step n in
// hand; numbers go on from launch to launch, so the argument holds across launches and routes.
template <class E, int W, class Route>
__device__ inline void relay(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, const char* in, char* out, u64 bytes) {
    enum : u32 { terms_ring = 0, sums_ring = 1 };
    constexpr u32 tile_vectors = rings.relay_tile_bytes / sizeof(Vec16);
    const Peers<W> peers(arena, space.relay_flags);
    u32* number_at = reinterpret_cast<u32*>(arena.local(space.relay_numbers)) + blockIdx.x;
    const u32 first_number = *number_at;
    const int rank = arena.rank;
    const int own_share = route.share_of(rank);
    const bool keeps = route.keeps(rank) && out != in;

    const u64 vectors = (bytes + sizeof(Vec16) - 1) / sizeof(Vec16);
    const u64 share = (vectors + route.owners() - 1) / route.owners();
    const u64 all_tiles = (share + tile_vectors - 1) / tile_vectors;
    if (blockIdx.x >= all_tiles) return;
    const u64 tiles = (all_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;

    const auto number = [&](u64 i) { return first_number + static_cast<u32>(i); };
    const auto place = [&](u32 ring, u64 i, u32 source) {
        const u64 index = ((u64(blockIdx.x) * 2 + ring) * relay_depth + number(i) % relay_depth) * W + source;
        return space.relay_tiles + index * rings.relay_tile_bytes;
    };
    const auto send = [&](int q, u64 target, u32 v, const u32(&data)[4]) {
        reinterpret_cast<Vec16*>(arena.peer(q, target))[v] = Vec16{{data[0], data[1], data[2], data[3]}};
    };
    const auto take = [&](u64 source, u32 v, u32(&data)[4]) { load_words(arena.local(source), u64(v) * sizeof(Vec16), ~u64(0), data); };
    const auto tile_start = [&](u64 i) { return (blockIdx.x + i * gridDim.x) * tile_vectors; };
    const auto tile_length = [&](u64 i) {
        const u64 rest = share - tile_start(i);
        return rest < tile_vectors ? static_cast<u32>(rest) : tile_vectors;
    };
    // Bytes from the tensor's start to vector v of the i-th tile of an owner's share; may lie behind the tensor's end for the last owners.
    const auto offset = [&](int of_share, u64 i, u32 v) { return (of_share * share + tile_start(i) + v) * sizeof(Vec16); };

    for (u64 i = 0; i < tiles + 2; ++i) {
        if (i < tiles && route.gives(rank)) {
            const u64 target = place(terms_ring, i, rank);
            const u32 length = tile_length(i);
            for (u32 v = threadIdx.x; v < length; v += blockDim.x) {
                u32 data[W - 1][4];
#pragma unroll
                for (int k = 1; k < W; ++k) {
                    const int of_share = route.share_of(rank_after<W>(rank, k));
                    if (of_share >= 0) load_words(in, offset(of_share, i, v), bytes, data[k - 1]);
                }
#pragma unroll
                for (int k = 1; k < W; ++k) {
                    const int q = rank_after<W>(rank, k);
                    const int of_share = route.share_of(q);
                    if (of_share < 0) continue;
                    send(q, target, v, data[k - 1]);
                    if (keeps) store_words(out, offset(of_share, i, v), bytes, data[k - 1]);
                }
            }
        }
        if (i >= 1) peers.wait_all(blockIdx.x, number(i - 1) + 1);
        if (i >= 1 && i - 1 < tiles && own_share >= 0) {
            const u64 target = place(sums_ring, i - 1, rank);
            const u32 length = tile_length(i - 1);
            for (u32 v = threadIdx.x; v < length; v += blockDim.x) {
                const u64 at = offset(own_share, i - 1, v);
                u32 own[4] = {}, terms[W][4], total[4] = {};
                if (route.gives(rank)) load_words(in, at, bytes, own);
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q == rank || !route.gives(q)) continue;
                    take(place(terms_ring, i - 1, q), v, terms[q]);
                    if constexpr (!Route::sums) {
#pragma unroll
                        for (int w = 0; w < 4; ++w) total[w] = terms[q][w];
                    }
                }
                if constexpr (Route::sums) sum_in_rank_order<E, W>(rank, own, terms, total);
#pragma unroll
                for (int k = 1; k < W; ++k) {
                    const int q = rank_after<W>(rank, k);
                    if (route.takes(q)) send(q, target, v, total);
                }
                if (route.takes(rank)) store_words(out, at, bytes, total);
                if (route.gives(rank) && keeps) store_words(out, at, bytes, own);
            }
        }
        if (i >= 2 && route.takes(rank)) {
            const u32 length = tile_length(i - 2);
            for (u32 v = threadIdx.x; v < length; v += blockDim.x) {
                u32 sums[W][4];
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q != rank && route.share_of(q) >= 0) take(place(sums_ring, i - 2, q), v, sums[q]);
                }
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    const int of_share = route.share_of(q);
                    if (q != rank && of_share >= 0) store_words(out, offset(of_share, i - 2, v), bytes, sums[q]);
                }
            }
        }
        if (i <= tiles) peers.signal_all(blockIdx.x, number(i) + 1);
    }
    if (threadIdx.x == 0) *number_at = number(tiles + 1);
}

}  // namespace peerlane
