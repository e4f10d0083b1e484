// A tensor of middling size in two trips, as packets, in one kernel, correct for any size. A packet goes on as soon as it has come, so the trips
// overlap.
//
//   two_shot             shares are summed by their owners, by a route (routes.cuh): all-reduce and reduce
//   broadcast_two_shot   the root gives each other rank a share, which passes it on: once the tensor out of the root's port, not W - 1 times
//
// Terms are added in rank order in fp32 and rounded once, by one rank for each element: all ranks have the same bits.
//
// Every share is at least one packet long, and packets behind the end of the tensor are sent too. So owners get packets of every other rank, and whoever
// takes sums gets them from every other rank: the rule of PacketBuffer. The root of a broadcast gets nothing that it needs; there the others
// send it empty messages that say they have begun.
//
// A share that a packet buffer has no room for goes in rounds. In each of them a thread makes both trips with its packets before it begins the next
// round; an empty term or sum is sent like any other. So each thread has a packet of the round from its like on every other rank when it ends
// the round: an owner their terms, the root of a reduce their sums, the root of a broadcast their empty messages, and the other ranks of a
// broadcast the root's share and the others' ones. What it sends in a round, terms and sums alike, it sends after all its reads of the round before.
//
// `in` and `out` are local and may be the same. `bytes` > 0 is a multiple of the element size and the same on all ranks. All blocks are resident
// together. A thread handles every so many packets of every share; it has loaded all of them from the other shares before it stores any.
#pragma once

#include <peerlane/collectives/routes.cuh>
#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// What a rank takes part in: a tensor of packets, cut into shares.
struct TensorInShares {
    const char* in;
    char* out;
    u64 bytes;
    u32 packets;    // of a share

    // Packet i of a share; behind its end lies nothing, though the tensor may go on.
    __device__ void load(const PacketRound& round, int share, u32 i, u32 (&words)[packet_words]) const {
        load_words(in, at(round, share, i), end(round, i), words);
    }
    __device__ void store(const PacketRound& round, int share, u32 i, const u32 (&words)[packet_words]) const {
        store_words(out, at(round, share, i), end(round, i), words);
    }

  private:
    __device__ u32 at(const PacketRound& round, int share, u32 i) const { return round.offset(share * packets + i); }
    __device__ u64 end(const PacketRound& round, u32 i) const { return round.holds(i, packets) ? bytes : 0; }
};

// Sums lie behind the terms of a part where all own. (Else nobody gets both.)
template <class E, int W, bool several_rounds = false, class Route>
__device__ inline void two_shot(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, const char* in, char* out, u64 bytes) {
    const bool all_own = route.owners() == W;
    const u32 room = space.packet_room<W>() / (all_own ? 2 : 1);
    const u32 sums = all_own ? room : 0;
    const TensorInShares shares{in, out, bytes, (packets_of(bytes) + route.owners() - 1) / route.owners()};
    const PacketRounds<W, several_rounds> rounds(arena, space, shares.packets, room);
    const int rank = arena.rank, own_share = route.share_of(rank);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;
    constexpr bool registers_do = W <= 4;

    const auto send_terms = [&](const PacketRound& round, u32 i) {
        u32 data[W - 1][packet_words];
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int owned = route.share_of(rank_after<W>(rank, k));
            if (owned >= 0) shares.load(round, owned, i, data[k - 1]);
        }
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (route.share_of(q) >= 0) push_packet(arena.peer(q, round.buffer.place(rank, i)), data[k - 1], round.epoch);
        }
    };
    const auto send_sum = [&](const PacketRound& round, u32 i) {
        u32 own[packet_words], terms[W][packet_words], total[packet_words];
        if (registers_do) shares.load(round, own_share, i, own);  // while terms are on their way
        pull_packets<W>(arena, arena.local(round.buffer.place(0, i)), round.buffer.stride, i, round.epoch, terms);
        if (!registers_do) shares.load(round, own_share, i, own);
        sum_in_rank_order<E, W>(rank, own, terms, total, space.factor);
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (route.takes(q)) push_packet(arena.peer(q, round.buffer.place(rank, sums + i)), total, round.epoch);
        }
        if (route.takes(rank)) shares.store(round, own_share, i, total);
    };
    // Where all own, both trips load all ports alike. Of a reduce the first one leaves the port into the root idle, and the second one the others: so both
    // are kept under way there, and owners send their terms one packet ahead of those that they wait for.
    const bool ahead = registers_do && !all_own && own_share >= 0;
#pragma unroll 1
    for (u32 number = 0; number < rounds.count(); ++number) {
        const PacketRound round = rounds[number];
        const u32 count = round.places(shares.packets);
        const u32 sent_first = ahead ? min(count, first + 1) : count;
        for (u32 i = first; i < sent_first; i += step) send_terms(round, i);
        if (own_share >= 0) {
            for (u32 i = first; i < count; i += step) {
                if (ahead && i + step < count) send_terms(round, i + step);
                send_sum(round, i);
            }
        }
        if (route.takes(rank)) {
            for (u32 i = first; i < count; i += step) {
                u32 totals[W][packet_words];
                pull_packets<W>(arena, arena.local(round.buffer.place(0, sums + i)), round.buffer.stride, sums + i, round.epoch, totals);
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q != rank) shares.store(round, route.share_of(q), i, totals[q]);
                }
            }
        }
    }
    if (route.keeps(rank) && in != out) {
        const Part part = part_of(bytes, blockIdx.x, gridDim.x);
        copy_bytes(Block{}, out + part.first, in + part.first, part.end - part.first);
    }
}

template <int W, bool several_rounds = false>
__device__ inline void broadcast_two_shot(const Arena& arena, const CollectiveWorkspace& space, int root, const char* in, char* out, u64 bytes) {
    const TensorInShares shares{in, out, bytes, (packets_of(bytes) + W - 2) / (W - 1)};
    const PacketRounds<W, several_rounds> rounds(arena, space, shares.packets, space.packet_room<W>());
    const int rank = arena.rank;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;
    const auto others_begun = [&](const PacketRound& round) {
        for (u32 i = first; i < round.places(0); i += step) {
            u32 begun[W][packet_words];
            pull_packets<W>(arena, arena.local(round.buffer.place(0, i)), round.buffer.stride, i, round.epoch, begun);
        }
    };

#pragma unroll 1
    for (u32 number = 0; number < rounds.count(); ++number) {
        const PacketRound round = rounds[number];
        const PacketBuffer& buffer = round.buffer;
        const u32 count = round.places(shares.packets);
        if (rank == root) {
            if (number > 0) others_begun(rounds[number - 1]);
            for (u32 i = first; i < count; i += step) {
#pragma unroll
                for (int k = 1; k < W; ++k) {
                    const int q = rank_after<W>(rank, k);
                    u32 data[packet_words];
                    shares.load(round, share_beside(root, q), i, data);
                    push_packet(arena.peer(q, buffer.place(rank, i)), data, round.epoch);
                }
            }
            continue;
        }
        for (u32 i = first; i < round.places(0); i += step) push_packet(arena.peer(root, buffer.place(rank, i)), {0, 0, 0}, round.epoch);
        for (u32 i = first; i < count; i += step) {
            u32 data[packet_words];
            pull_packet(arena, root, arena.local(buffer.place(root, i)), i, round.epoch, data);
#pragma unroll
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(rank, k);
                if (q != root) push_packet(arena.peer(q, buffer.place(rank, i)), data, round.epoch);
            }
            shares.store(round, share_beside(root, rank), i, data);
        }
        const u32 passing_on = ((1u << W) - 1) & ~(1u << root);
        for (u32 i = first; i < count; i += step) {
            u32 data[W][packet_words];
            pull_packets<W>(arena, PacketPlaces{arena.local(buffer.place(0, i)), buffer.stride, passing_on, i}, round.epoch, data);
#pragma unroll
            for (int q = 0; q < W; ++q) {
                if (q != rank && q != root) shares.store(round, share_beside(root, q), i, data[q]);
            }
        }
    }
    if (rank != root) return;
    if (in != out) {
        const Part part = part_of(bytes, blockIdx.x, gridDim.x);
        copy_bytes(Block{}, out + part.first, in + part.first, part.end - part.first);
    }
    others_begun(rounds[rounds.count() - 1]);
}

}  // namespace peerlane
