// Messages between all ranks, as packets, in one kernel: what all-gather, all-to-all, broadcast, gather and scatter are; and, where the
// messages are terms of a sum, reduce-scatter and reduce.
//
// Every rank sends at least one packet to every other one, an empty message's holds no data, and waits for those of all others: the rule of PacketBuffer.
//
// A message of `bytes` takes ceil(bytes / 12) packets. If a rank's part of the packet buffer has no room for the longest one, they go in
// several rounds. Every rank must then find that length among its own messages: those of one call that are not empty have one length, and
// no rank has none.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// Packets of the longest message that this rank sends or gets.
template <int W>
__device__ inline u32 longest_message(const Messages& messages) {
    u64 longest = 0;
#pragma unroll
    for (int q = 0; q < W; ++q) {
        const u64 send = messages.send_bytes[q], receive = messages.receive_bytes[q];
        longest = send > longest ? send : longest;
        longest = receive > longest ? receive : longest;
    }
    return packets_of(longest);
}

template <int W>
__device__ inline void push_messages(const Arena& arena, const PacketRound& round, const Messages& messages, const char* in) {
    const u64 own_place = round.buffer.place(arena.rank, 0);
    const u32 step = gridDim.x * blockDim.x;
#pragma unroll
    for (int k = 1; k < W; ++k) {
        const int q = rank_after<W>(arena.rank, k);
        const u64 bytes = messages.send_bytes[q];
        const u32 count = round.places(packets_of(bytes));
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
            u32 data[packet_words];
            load_words(in + messages.send_at[q], round.offset(i), bytes, data);
            push_packet(arena.peer(q, own_place + i * sizeof(Vec16)), data, round.epoch);
        }
    }
}

template <int W>
__device__ inline void pull_messages(const Arena& arena, const PacketRound& round, const Messages& messages, const char* in, char* out) {
    const u32 step = gridDim.x * blockDim.x;
    const u32 rank = arena.rank;
    u32 counts[W], longest = 0;
#pragma unroll
    for (int q = 0; q < W; ++q) {
        counts[q] = round.places(packets_of(messages.receive_bytes[q]));
        longest = counts[q] > longest ? counts[q] : longest;
    }
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < longest; i += step) {
        u32 own[packet_words], data[W][packet_words], sources = 0;
        load_words(in + messages.send_at[rank], round.offset(i), messages.send_bytes[rank], own);
#pragma unroll
        for (int q = 0; q < W; ++q) sources |= (i < counts[q] ? 1u : 0u) << q;
        pull_packets<W>(arena, PacketPlaces{arena.local(round.buffer.place(0, i)), round.buffer.stride, sources, i}, round.epoch, data);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != rank) store_words(out + messages.receive_at[q], round.offset(i), messages.receive_bytes[q], data[q]);
        }
        store_words(out + messages.receive_at[rank], round.offset(i), messages.receive_bytes[rank], own);
    }
}

template <int W, bool several_rounds = false>
__device__ inline void exchange_by_packets(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    const PacketRounds<W, several_rounds> rounds(arena, space, longest_message<W>(messages), space.packet_room<W>());
#pragma unroll 1
    for (u32 number = 0; number < rounds.count(); ++number) {
        push_messages<W>(arena, rounds[number], messages, in);
        pull_messages<W>(arena, rounds[number], messages, in, out);
    }
}

// All messages to one rank have one length and are terms of a sum, which goes to out + receive_at[rank]. Added as in all_reduce.cuh. A rank
// that gets no sum keeps its message to itself: copies it to that place, unless it is there already.
template <class E, int W, bool several_rounds = false>
__device__ inline void reduce_by_packets(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    const PacketRounds<W, several_rounds> rounds(arena, space, longest_message<W>(messages), space.packet_room<W>());
    const u32 step = gridDim.x * blockDim.x;
    const u32 rank = arena.rank;
    const u64 bytes = messages.receive_bytes[rank];
#pragma unroll 1
    for (u32 number = 0; number < rounds.count(); ++number) {
        const PacketRound round = rounds[number];
        push_messages<W>(arena, round, messages, in);
        const u32 count = round.places(packets_of(bytes));
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
            u32 own[packet_words], terms[W][packet_words], total[packet_words];
            load_words(in + messages.send_at[rank], round.offset(i), bytes, own);
            pull_packets<W>(arena, arena.local(round.buffer.place(0, i)), round.buffer.stride, i, round.epoch, terms);
            sum_in_rank_order<E, W>(rank, own, terms, total, space.factor);
            store_words(out + messages.receive_at[rank], round.offset(i), bytes, total);
        }
    }
    if (bytes != 0 || in + messages.send_at[rank] == out + messages.receive_at[rank]) return;
    const Part part = part_of(messages.send_bytes[rank], blockIdx.x, gridDim.x);
    copy_bytes(Block{}, out + messages.receive_at[rank] + part.first, in + messages.send_at[rank] + part.first, part.end - part.first);
}

}  // namespace peerlane
