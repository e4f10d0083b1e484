// Small messages between all ranks, as packets, in one kernel: what all-gather, all-to-all, broadcast, gather and scatter are; and, where the
// messages are terms of a sum, reduce-scatter and reduce.
//
// Every rank sends at least one packet to every other one, an empty message's holds no data, and waits for those of all others: the rule of PacketBuffer.
//
// A message of `bytes` takes ceil(bytes / 12) packets, for which a rank's part of the packet buffer has to do.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

__device__ inline u32 packets_of_message(u64 bytes) { return bytes == 0 ? 1 : packets_of(bytes); }

template <int W>
__device__ inline void push_messages(const Arena& arena, u64 own_place, const Messages& messages, const char* in, u32 epoch) {
    const u32 step = gridDim.x * blockDim.x;
#pragma unroll
    for (int k = 1; k < W; ++k) {
        const int q = rank_after<W>(arena.rank, k);
        const u64 bytes = messages.send_bytes[q];
        const u32 count = packets_of_message(bytes);
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
            u32 data[packet_words];
            load_words(in + messages.send_at[q], u64(i) * packet_data_bytes, bytes, data);
            push_packet(arena.peer(q, own_place + i * sizeof(Vec16)), data, epoch);
        }
    }
}

template <int W>
__device__ inline void exchange_by_packets(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const PacketBuffer buffer = space.packet_buffer<W>(epoch);
    const u32 step = gridDim.x * blockDim.x;
    const u32 rank = arena.rank;
    push_messages<W>(arena, buffer.place(rank, 0), messages, in, epoch);

    u32 counts[W], longest = 0;
#pragma unroll
    for (int q = 0; q < W; ++q) {
        counts[q] = packets_of_message(messages.receive_bytes[q]);
        longest = counts[q] > longest ? counts[q] : longest;
    }
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < longest; i += step) {
        u32 own[packet_words], data[W][packet_words], sources = 0;
        load_words(in + messages.send_at[rank], u64(i) * packet_data_bytes, messages.send_bytes[rank], own);
#pragma unroll
        for (int q = 0; q < W; ++q) sources |= (i < counts[q] ? 1u : 0u) << q;
        pull_packets<W>(arena, PacketPlaces{arena.local(buffer.place(0, i)), buffer.stride, sources, i}, epoch, data);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != rank) store_words(out + messages.receive_at[q], u64(i) * packet_data_bytes, messages.receive_bytes[q], data[q]);
        }
        store_words(out + messages.receive_at[rank], u64(i) * packet_data_bytes, messages.receive_bytes[rank], own);
    }
}

// All messages to one rank have one length and are terms of a sum, which goes to out + receive_at[rank]. Added as in all_reduce.cuh. A rank
// that gets no sum keeps its message to itself: copies it to that place, unless it is there already.
template <class E, int W>
__device__ inline void reduce_by_packets(const Arena& arena, const CollectiveWorkspace& space, const Messages& messages, const char* in, char* out) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const PacketBuffer buffer = space.packet_buffer<W>(epoch);
    const u32 step = gridDim.x * blockDim.x;
    const u32 rank = arena.rank;
    push_messages<W>(arena, buffer.place(rank, 0), messages, in, epoch);

    const u64 bytes = messages.receive_bytes[rank];
    const u32 count = packets_of_message(bytes);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        u32 own[packet_words], terms[W][packet_words], total[packet_words];
        load_words(in + messages.send_at[rank], u64(i) * packet_data_bytes, bytes, own);
        pull_packets<W>(arena, arena.local(buffer.place(0, i)), buffer.stride, i, epoch, terms);
        sum_in_rank_order<E, W>(rank, own, terms, total);
        store_words(out + messages.receive_at[rank], u64(i) * packet_data_bytes, bytes, total);
    }
    if (bytes != 0 || in + messages.send_at[rank] == out + messages.receive_at[rank]) return;
    const Part part = part_of(messages.send_bytes[rank], blockIdx.x, gridDim.x);
    copy_bytes(Block{}, out + messages.receive_at[rank] + part.first, in + messages.send_at[rank] + part.first, part.end - part.first);
}

}  // namespace peerlane
