// Sum of one small tensor over all ranks, as packets, in one kernel and correct for any size: every rank sends all it has to every other rank. The
// shortest path. In two trips, with fewer bytes: two_shot.cuh; through rings of tiles, for large ones: relay.cuh.
//
// The terms are added in rank order in fp32 and rounded once, by every rank for itself: the same additions, hence the same bits.
//
// `in` and `out` are local and may be the same. `bytes` is a multiple of the element size and the same on all ranks. All blocks are resident
// together.
#pragma once

#include <peerlane/collectives/workspace.cuh>

namespace peerlane {

// Needs ceil(bytes / 12) packets per rank in the buffer.
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
        sum_in_rank_order<E, W>(arena.rank, own, terms, total, space.factor);
        store_words(out, u64(i) * packet_data_bytes, bytes, total);
    }
}

}  // namespace peerlane
