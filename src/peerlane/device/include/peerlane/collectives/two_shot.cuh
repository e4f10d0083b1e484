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
// send it one packet that says they have begun.
//
// `in` and `out` are local and may be the same. `bytes` > 0 is a multiple of the element size and the same on all ranks. All blocks are resident
// together. A thread handles every so many packets of every share; it has loaded all of them from the other shares before it stores any.
#pragma once

#include <peerlane/collectives/routes.cuh>
#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// Needs room for a share's packets from every rank in the buffer, and where all own for as many sums behind them. (Else nobody gets both.)
template <class E, int W, class Route>
__device__ inline void two_shot(
    const Arena& arena, const CollectiveWorkspace& space, const Route& route, const char* in, char* out, u64 bytes) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const PacketBuffer buffer = space.packet_buffer<W>(epoch);
    const u32 share = (packets_of(bytes) + route.owners() - 1) / route.owners();
    const u32 sums = route.owners() == W ? share : 0;
    const int rank = arena.rank, own_share = route.share_of(rank);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;
    const auto load = [&](u32 i, u32(&words)[packet_words]) { load_words(in, u64(i) * packet_data_bytes, bytes, words); };
    const auto store = [&](u32 i, const u32(&words)[packet_words]) { store_words(out, u64(i) * packet_data_bytes, bytes, words); };

    for (u32 i = first; i < share; i += step) {
        u32 data[W - 1][packet_words];
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int owned = route.share_of(rank_after<W>(rank, k));
            if (owned >= 0) load(owned * share + i, data[k - 1]);
        }
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (route.share_of(q) >= 0) push_packet(arena.peer(q, buffer.place(rank, i)), data[k - 1], epoch);
        }
    }
    if (own_share >= 0) {
        for (u32 i = first; i < share; i += step) {
            u32 own[packet_words], terms[W][packet_words], total[packet_words];
            load(own_share * share + i, own);
            pull_packets<W>(arena, arena.local(buffer.place(0, i)), buffer.stride, i, epoch, terms);
            sum_in_rank_order<E, W>(rank, own, terms, total);
#pragma unroll
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(rank, k);
                if (route.takes(q)) push_packet(arena.peer(q, buffer.place(rank, sums + i)), total, epoch);
            }
            if (route.takes(rank)) store(own_share * share + i, total);
        }
    }
    if (route.takes(rank)) {
        for (u32 i = first; i < share; i += step) {
            u32 totals[W][packet_words];
            pull_packets<W>(arena, arena.local(buffer.place(0, sums + i)), buffer.stride, sums + i, epoch, totals);
#pragma unroll
            for (int q = 0; q < W; ++q) {
                if (q != rank) store(route.share_of(q) * share + i, totals[q]);
            }
        }
    }
    if (route.keeps(rank) && in != out) {
        const Part part = part_of(bytes, blockIdx.x, gridDim.x);
        copy_bytes(Block{}, out + part.first, in + part.first, part.end - part.first);
    }
}

// Needs room for a share's packets from every rank in the buffer.
template <int W>
__device__ inline void broadcast_two_shot(const Arena& arena, const CollectiveWorkspace& space, int root, const char* in, char* out, u64 bytes) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const PacketBuffer buffer = space.packet_buffer<W>(epoch);
    const u32 share = (packets_of(bytes) + W - 2) / (W - 1);
    const int rank = arena.rank;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;
    const auto store = [&](u32 i, const u32(&words)[packet_words]) { store_words(out, u64(i) * packet_data_bytes, bytes, words); };

    if (rank == root) {
        for (u32 i = first; i < share; i += step) {
#pragma unroll
            for (int k = 1; k < W; ++k) {
                const int q = rank_after<W>(rank, k);
                u32 data[packet_words];
                load_words(in, (u64(share_beside(root, q)) * share + i) * packet_data_bytes, bytes, data);
                push_packet(arena.peer(q, buffer.place(rank, i)), data, epoch);
            }
        }
        if (in != out) {
            const Part part = part_of(bytes, blockIdx.x, gridDim.x);
            copy_bytes(Block{}, out + part.first, in + part.first, part.end - part.first);
        }
        if (first == 0) {
            u32 begun[W][packet_words];
            pull_packets<W>(arena, arena.local(buffer.place(0, 0)), buffer.stride, 0, epoch, begun);
        }
        return;
    }
    if (first == 0) push_packet(arena.peer(root, buffer.place(rank, 0)), {0, 0, 0}, epoch);
    for (u32 i = first; i < share; i += step) {
        u32 data[packet_words];
        pull_packet(arena, root, arena.local(buffer.place(root, i)), i, epoch, data);
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(rank, k);
            if (q != root) push_packet(arena.peer(q, buffer.place(rank, i)), data, epoch);
        }
        store(share_beside(root, rank) * share + i, data);
    }
    const u32 passing_on = ((1u << W) - 1) & ~(1u << root);
    for (u32 i = first; i < share; i += step) {
        u32 data[W][packet_words];
        pull_packets<W>(arena, PacketPlaces{arena.local(buffer.place(0, i)), buffer.stride, passing_on, i}, epoch, data);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != rank && q != root) store(share_beside(root, q) * share + i, data[q]);
        }
    }
}

}  // namespace peerlane
