// Packets: twelve bytes of data and their epoch in one indivisible store.
//
// The flag travels with the data, so there is no fence, no barrier and one trip over the link; three quarters of the bytes are data.
// A packet's place is free to be written again in the epoch after next (two alternating buffers) if every rank's completion of an epoch
// implies that every other rank has begun it. Where a launch goes through several epochs, the same holds thread by thread: workspace.cuh.
#pragma once

#include <peerlane/peers/arena.cuh>

namespace peerlane {

constexpr int packet_words = 3;
constexpr int packet_data_bytes = 4 * packet_words;

// Packets that `bytes` of data take.
__device__ inline u32 packets_of(u64 bytes) { return static_cast<u32>((bytes + packet_data_bytes - 1) / packet_data_bytes); }

__device__ inline void push_packet(char* place, const u32 (&data)[packet_words], u32 epoch) {
    ptx::store_relaxed_system(reinterpret_cast<Vec16*>(place), Vec16{{data[0], data[1], data[2], epoch}});
}

// The same to every other rank, at one offset of the arena.
template <int W>
__device__ inline void push_packet_to_all(const Arena& arena, u64 offset, const u32 (&data)[packet_words], u32 epoch) {
#pragma unroll
    for (int k = 1; k < W; ++k) push_packet(arena.peer(rank_after<W>(arena.rank, k), offset), data, epoch);
}

// Where a packet from each rank is awaited: rank q's at first + q * stride, in local memory, from the ranks of the bit mask `sources`.
// `slot` only names the wait in a fault record.
struct PacketPlaces {
    const char* first;
    u64 stride;
    u32 sources;
    u32 slot;
};

// Wait for one packet of every rank of `places.sources` but the own; other elements of the result are left alone. Where a wait ends early, a
// packet that has not come reads as zeros.
template <int W>
__device__ inline void pull_packets(const Arena& arena, const PacketPlaces& places, u32 epoch, u32 (&data)[W][packet_words]) {
    Deadline deadline;
    while (true) {
        u32 seen[W];
#pragma unroll
        for (int q = 0; q < W; ++q) {
            seen[q] = epoch;
            if (q == arena.rank || (places.sources >> q & 1) == 0) continue;
            const Vec16 packet = ptx::load_relaxed_system(reinterpret_cast<const Vec16*>(places.first + q * places.stride));
            seen[q] = packet.word[packet_words];
#pragma unroll
            for (int w = 0; w < packet_words; ++w) data[q][w] = packet.word[w];
        }
        int missing = -1;
        u32 stale = 0;
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (seen[q] != epoch) missing = q, stale = seen[q];
        }
        if (missing < 0) return;
        if (deadline.ends(arena, Awaited{whole_block, static_cast<u32>(missing), places.slot, epoch}, stale)) {
#pragma unroll
            for (int q = 0; q < W; ++q) {
#pragma unroll
                for (int w = 0; w < packet_words; ++w) data[q][w] = seen[q] == epoch ? data[q][w] : 0;
            }
            return;
        }
    }
}

// From every other rank.
template <int W>
__device__ inline void pull_packets(const Arena& arena, const char* first, u64 stride, u32 slot, u32 epoch, u32 (&data)[W][packet_words]) {
    pull_packets<W>(arena, PacketPlaces{first, stride, (1u << W) - 1, slot}, epoch, data);
}

// From rank `source` alone, at `place` in local memory.
__device__ inline void pull_packet(const Arena& arena, u32 source, const char* place, u32 slot, u32 epoch, u32 (&data)[packet_words]) {
    Deadline deadline;
    while (true) {
        const Vec16 packet = ptx::load_relaxed_system(reinterpret_cast<const Vec16*>(place));
        const u32 seen = packet.word[packet_words];
        if (seen == epoch) {
#pragma unroll
            for (int w = 0; w < packet_words; ++w) data[w] = packet.word[w];
            return;
        }
        if (deadline.ends(arena, Awaited{whole_block, source, slot, epoch}, seen)) {
#pragma unroll
            for (int w = 0; w < packet_words; ++w) data[w] = 0;
            return;
        }
    }
}

}  // namespace peerlane
