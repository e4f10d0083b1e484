// Sum of one small tensor over all ranks, as packets, each in one kernel and correct for any size:
//
//   one_shot   every rank sends all it has to every other rank; shortest path, for the smallest tensors
//   two_shot   every rank sums one share and sends the sum to the others; two trips, fewer bytes
//
// The terms are added in rank order in fp32 and rounded once. In two shots one rank does so for each element, so that all ranks have the
// same bits; in one shot every rank does the same additions. The same on all ranks through a ring of tiles, for large ones: relay.cuh.
//
// `in` and `out` are local and may be the same. `bytes` is a multiple of the element size and the same on all ranks. All blocks are resident
// together.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// Needs ceil(bytes / 12) packets per rank in the buffer.
//
// A place is reused two launches later: to finish a launch a rank needs a packet of every other rank's same launch, hence every other rank
// has finished the one before.
template <class E, int W>
__device__ inline void one_shot(const Arena& arena, const CollectiveWorkspace& space, const char* in, char* out, u64 bytes) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const PacketBuffer buffer = space.packet_buffer<W>(epoch);
    const u32 count = packets_of(bytes);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;

    for (u32 i = first; i < count; i += step) {
        u32 own[packet_words];
        load_words(in, u64(i) * packet_data_bytes, bytes, own);
        push_packet_to_all<W>(arena, buffer.place(arena.rank, i), own, epoch);
    }
    for (u32 i = first; i < count; i += step) {
        u32 own[packet_words], terms[W][packet_words], total[packet_words];
        load_words(in, u64(i) * packet_data_bytes, bytes, own);
        pull_packets<W>(arena, arena.local(buffer.place(0, i)), buffer.stride, i, epoch, terms);
        sum_in_rank_order<E, W>(arena.rank, own, terms, total);
        store_words(out, u64(i) * packet_data_bytes, bytes, total);
    }
}

// Two shots over `count` packets through `buffer`, which holds 2 * share packets of every rank, share = ceil(count / W). Rank q sums the q-th
// share.
// `load(i, words)` gives packet i of this rank's tensor, zeros behind its end; `store(i, words)` takes packet i of the sum. A thread of
// the grid handles every so many packets of every share; it has loaded all of them from the other shares before it stores any.
//
// Every share has a packet, and those behind the end of the tensor are sent too, so every rank gets packets of every other one and reuse is
// safe as in one_shot.
template <class E, int W, class Load, class Store>
__device__ inline void two_shot_packets(
    const Arena& arena, u32 epoch, const PacketBuffer& buffer, u32 count, const Load& load, const Store& store) {
    const u32 share = (count + W - 1) / W;
    const u32 rank = arena.rank;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;

    for (u32 i = first; i < share; i += step) {
        u32 data[W - 1][packet_words];
#pragma unroll
        for (int k = 1; k < W; ++k) load(rank_after<W>(rank, k) * share + i, data[k - 1]);
#pragma unroll
        for (int k = 1; k < W; ++k) {
            push_packet(arena.peer(rank_after<W>(rank, k), buffer.place(rank, i)), data[k - 1], epoch);
        }
    }
    for (u32 i = first; i < share; i += step) {
        u32 own[packet_words], terms[W][packet_words], total[packet_words];
        load(rank * share + i, own);
        pull_packets<W>(arena, arena.local(buffer.place(0, i)), buffer.stride, i, epoch, terms);
        sum_in_rank_order<E, W>(rank, own, terms, total);
        push_packet_to_all<W>(arena, buffer.place(rank, share + i), total, epoch);
        store(rank * share + i, total);
    }
    for (u32 i = first; i < share; i += step) {
        u32 sums[W][packet_words];
        pull_packets<W>(arena, arena.local(buffer.place(0, share + i)), buffer.stride, share + i, epoch, sums);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != rank) store(q * share + i, sums[q]);
        }
    }
}

// Needs 2 * ceil(ceil(bytes / 12) / W) packets per rank in the buffer.
template <class E, int W>
__device__ inline void two_shot(const Arena& arena, const CollectiveWorkspace& space, const char* in, char* out, u64 bytes) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const auto load = [&](u32 i, u32(&words)[packet_words]) { load_words(in, u64(i) * packet_data_bytes, bytes, words); };
    const auto store = [&](u32 i, const u32(&words)[packet_words]) { store_words(out, u64(i) * packet_data_bytes, bytes, words); };
    two_shot_packets<E, W>(arena, epoch, space.packet_buffer<W>(epoch), packets_of(bytes), load, store);
}

}  // namespace peerlane
