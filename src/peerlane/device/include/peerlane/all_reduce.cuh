// Sum of one tensor over all ranks, three ways, each in one kernel and correct for any size:
//
//   one_shot       every rank sends all it has to every other rank, as packets; shortest path, for small tensors
//   two_shot       every rank sums one share and sends the sum to the others, both as packets; two trips, fewer bytes
//   two_shot_ring  the same through rings of tiles with signals, in a pipeline of three stages; no packet overhead, any size
//
// The terms are added in rank order in fp32 and rounded once. In the two-shot forms one rank does so for each element, so that all ranks
// have the same bits; in the one-shot form every rank does the same additions.
//
// `in` and `out` are 16-byte aligned, local, and may be the same. `bytes` is a multiple of the element size and the same on all ranks, as is
// the grid. All blocks must be resident together. Launches that share a workspace are ordered by one stream.
#pragma once

#include <peerlane/comm.cuh>
#include <peerlane/numeric.cuh>

namespace peerlane {

// Where the workspace lies in the arena (offsets in bytes). Zero before the first launch, then left to the kernels.
// Mirrors `peerlane.device.all_reduce.Workspace`.
struct AllReduceWorkspace {
    u64 epochs;               // u32[max_epoch_blocks]
    u64 packets;              // two alternating buffers of packet_buffer_bytes each
    u64 packet_buffer_bytes;
    u64 ring;                 // ring_blocks * 2 * ring_depth * W tiles of tile_vectors vectors
    u64 ring_flags;           // ring_blocks * W lines
    u64 ring_numbers;         // u32[ring_blocks]
    u64 ring_blocks;          // the largest grid of two_shot_ring
};

constexpr u32 ring_depth = 4;           // divides 2^32, so that numbers may wrap
constexpr u32 tile_vectors = 1024;  // 16-byte vectors in one tile

// Words of 32 bits at `offset` of a buffer of `bytes`; what lies behind the end reads as zero.
template <int words>
__device__ inline void load_words(const char* buffer, u64 offset, u64 bytes, u32 (&value)[words]) {
    if (offset + 4 * words <= bytes) {
        if constexpr (words == 4) {
            const Vec16 whole = *reinterpret_cast<const Vec16*>(buffer + offset);
#pragma unroll
            for (int w = 0; w < words; ++w) value[w] = whole.word[w];
        } else {
#pragma unroll
            for (int w = 0; w < words; ++w) value[w] = *reinterpret_cast<const u32*>(buffer + offset + 4 * w);
        }
        return;
    }
#pragma unroll
    for (int w = 0; w < words; ++w) {
        const u64 at = offset + 4 * w;
        value[w] = 0;
        if (at + 4 <= bytes) {
            value[w] = *reinterpret_cast<const u32*>(buffer + at);
        } else if (at + 2 <= bytes) {
            value[w] = *reinterpret_cast<const u16*>(buffer + at);
        }
    }
}

// The reverse; nothing is written behind the end.
template <int words>
__device__ inline void store_words(char* buffer, u64 offset, u64 bytes, const u32 (&value)[words]) {
    if (offset + 4 * words <= bytes) {
        if constexpr (words == 4) {
            *reinterpret_cast<Vec16*>(buffer + offset) = Vec16{{value[0], value[1], value[2], value[3]}};
        } else {
#pragma unroll
            for (int w = 0; w < words; ++w) *reinterpret_cast<u32*>(buffer + offset + 4 * w) = value[w];
        }
        return;
    }
#pragma unroll
    for (int w = 0; w < words; ++w) {
        const u64 at = offset + 4 * w;
        if (at + 4 <= bytes) {
            *reinterpret_cast<u32*>(buffer + at) = value[w];
        } else if (at + 2 <= bytes) {
            *reinterpret_cast<u16*>(buffer + at) = static_cast<u16>(value[w]);
        }
    }
}

// The k-th rank after `rank`: every rank starts with another peer, so that no port is met by all at once.
template <int W>
__device__ inline int rank_after(u32 rank, int k) {
    const int q = static_cast<int>(rank) + k;
    return q < W ? q : q - W;
}

// own + the other ranks' terms, in rank order.
template <class E, int W, int words>
__device__ inline void sum_in_rank_order(u32 rank, const u32 (&own)[words], const u32 (&terms)[W][words], u32 (&result)[words]) {
    Accumulator<E, words> total;
#pragma unroll
    for (int q = 0; q < W; ++q) {
        u32 term[words];
#pragma unroll
        for (int w = 0; w < words; ++w) term[w] = q == rank ? own[w] : terms[q][w];
        if (q == 0) {
            total.set(term);
        } else {
            total.add(term);
        }
    }
    total.round(result);
}

template <int W>
__device__ inline void push_to_all(const Arena& arena, u64 offset, const u32 (&data)[packet_words], u32 epoch) {
#pragma unroll
    for (int k = 1; k < W; ++k) push_packet(arena.peer(rank_after<W>(arena.rank, k), offset), data, epoch);
}

// Needs W * count * 16 bytes of packet buffer, count = ceil(bytes / 12).
//
// A place is reused two launches later: to finish a launch a rank needs a packet of every other rank's same launch, hence every other rank
// has finished the one before.
template <class E, int W>
__device__ inline void one_shot(const Arena& arena, const AllReduceWorkspace& space, const char* in, char* out, u64 bytes) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const u64 buffer = space.packets + (epoch & 1) * space.packet_buffer_bytes;
    const u32 count = (bytes + packet_data_bytes - 1) / packet_data_bytes;
    const u64 stride = u64(count) * sizeof(Vec16);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.x;

    for (u32 i = first; i < count; i += step) {
        u32 own[packet_words];
        load_words(in, u64(i) * packet_data_bytes, bytes, own);
        push_to_all<W>(arena, buffer + arena.rank * stride + i * sizeof(Vec16), own, epoch);
    }
    for (u32 i = first; i < count; i += step) {
        u32 own[packet_words], terms[W][packet_words], total[packet_words];
        load_words(in, u64(i) * packet_data_bytes, bytes, own);
        pull_packets<W>(arena, arena.local(buffer + i * sizeof(Vec16)), stride, i, epoch, terms);
        sum_in_rank_order<E, W>(arena.rank, own, terms, total);
        store_words(out, u64(i) * packet_data_bytes, bytes, total);
    }
}

// Two shots over `count` packets at `terms_at` in the arena, where 2 * W * share * 16 bytes are needed, share = ceil(count / W). Rank
// q sums the q-th share.
// `load(i, words)` gives packet i of this rank's tensor, zeros behind its end; `store(i, words)` takes packet i of the sum. This thread
// handles packets `first`, `first + step`, ... of every share; it has loaded all of them from the other shares before it stores any.
//
// Every share has a packet, and those behind the end of the tensor are sent too, so every rank gets packets of every other one and reuse is
// safe as in one_shot.
template <class E, int W, class Load, class Store>
__device__ inline void two_shot_packets(
    const Arena& arena, u32 epoch, u64 terms_at, u32 count, u32 first, u32 step, const Load& load, const Store& store) {
    const u32 share = (count + W - 1) / W;
    const u64 stride = u64(share) * sizeof(Vec16);
    const u64 sums_at = terms_at + W * stride;
    const u32 rank = arena.rank;

    for (u32 i = first; i < share; i += step) {
        u32 data[W - 1][packet_words];
#pragma unroll
        for (int k = 1; k < W; ++k) load(rank_after<W>(rank, k) * share + i, data[k - 1]);
#pragma unroll
        for (int k = 1; k < W; ++k) {
            push_packet(arena.peer(rank_after<W>(rank, k), terms_at + rank * stride + i * sizeof(Vec16)), data[k - 1], epoch);
        }
    }
    for (u32 i = first; i < share; i += step) {
        u32 own[packet_words], terms[W][packet_words], total[packet_words];
        load(rank * share + i, own);
        pull_packets<W>(arena, arena.local(terms_at + i * sizeof(Vec16)), stride, i, epoch, terms);
        sum_in_rank_order<E, W>(rank, own, terms, total);
        push_to_all<W>(arena, sums_at + rank * stride + i * sizeof(Vec16), total, epoch);
        store(rank * share + i, total);
    }
    for (u32 i = first; i < share; i += step) {
        u32 sums[W][packet_words];
        pull_packets<W>(arena, arena.local(sums_at + i * sizeof(Vec16)), stride, share + i, epoch, sums);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != rank) store(q * share + i, sums[q]);
        }
    }
}

// Needs 2 * W * ceil(ceil(bytes / 12) / W) * 16 bytes of packet buffer.
template <class E, int W>
__device__ inline void two_shot(const Arena& arena, const AllReduceWorkspace& space, const char* in, char* out, u64 bytes) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(space.epochs)));
    const auto load = [&](u32 i, u32(&words)[packet_words]) { load_words(in, u64(i) * packet_data_bytes, bytes, words); };
    const auto store = [&](u32 i, const u32(&words)[packet_words]) { store_words(out, u64(i) * packet_data_bytes, bytes, words); };
    two_shot_packets<E, W>(
        arena,
        epoch,
        space.packets + (epoch & 1) * space.packet_buffer_bytes,
        (bytes + packet_data_bytes - 1) / packet_data_bytes,
        blockIdx.x * blockDim.x + threadIdx.x,
        gridDim.x * blockDim.x,
        load,
        store);
}

// Tiles go round a ring of `ring_depth` places per pair of ranks, block and direction; block b talks to the blocks b of the other ranks only.
// In step i a block sends the terms of tile i, sums tile i - 1 and sends the sum, takes in the sums of tile i - 2, and gives one signal. The
// link is at work meanwhile: the copy of step i - 2 runs while the stores of this step are on their way.
//
// No place is written before it was read, without any other signal. Having a rank's signal of step j means that it has read the terms of tile
// j - 1 and the sums of tile j - 2.
//   terms of tile i are sent with the signals of step i - 2 in hand: terms of tile i - 3 have been read;
//   sums of tile i - 1 are sent with the signals of step i - 1 in hand: sums of tile i - 3 have been read.
// Both are in time for a ring of four; three would do. A launch of n tiles has steps 0 to n + 1 and ends with the signals of step n in
// hand; numbers go on from launch to launch, so the argument holds across launches.
//
// A grid of at most space.ring_blocks.
template <class E, int W>
__device__ inline void two_shot_ring(const Arena& arena, const AllReduceWorkspace& space, const char* in, char* out, u64 bytes) {
    enum : u32 { terms_ring = 0, sums_ring = 1 };
    const Signals<W> signals{space.ring_flags};
    u32* number_at = reinterpret_cast<u32*>(arena.local(space.ring_numbers)) + blockIdx.x;
    const u32 first_number = *number_at;
    const u32 rank = arena.rank;

    const u64 vectors = (bytes + sizeof(Vec16) - 1) / sizeof(Vec16);
    const u64 share = (vectors + W - 1) / W;
    const u64 all_tiles = (share + tile_vectors - 1) / tile_vectors;
    if (blockIdx.x >= all_tiles) return;
    const u64 tiles = (all_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;

    const auto number = [&](u64 i) { return first_number + static_cast<u32>(i); };
    const auto place = [&](u32 ring, u64 i, u32 source) {
        const u64 index = ((u64(blockIdx.x) * 2 + ring) * ring_depth + number(i) % ring_depth) * W + source;
        return space.ring + index * (tile_vectors * sizeof(Vec16));
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
    // Bytes from the tensor's start to vector v of the i-th tile of owner q's share; may lie behind the tensor's end for the last owners.
    const auto offset = [&](int q, u64 i, u32 v) { return (q * share + tile_start(i) + v) * sizeof(Vec16); };

    for (u64 i = 0; i < tiles + 2; ++i) {
        if (i < tiles) {
            const u64 target = place(terms_ring, i, rank);
            const u32 length = tile_length(i);
            for (u32 v = threadIdx.x; v < length; v += blockDim.x) {
                u32 data[W - 1][4];
#pragma unroll
                for (int k = 1; k < W; ++k) load_words(in, offset(rank_after<W>(rank, k), i, v), bytes, data[k - 1]);
#pragma unroll
                for (int k = 1; k < W; ++k) send(rank_after<W>(rank, k), target, v, data[k - 1]);
            }
        }
        if (i >= 1) signals.wait_all(arena, number(i - 1) + 1);
        if (i >= 1 && i - 1 < tiles) {
            const u64 target = place(sums_ring, i - 1, rank);
            const u32 length = tile_length(i - 1);
            for (u32 v = threadIdx.x; v < length; v += blockDim.x) {
                const u64 at = offset(rank, i - 1, v);
                u32 own[4], terms[W][4], total[4];
                load_words(in, at, bytes, own);
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q != rank) take(place(terms_ring, i - 1, q), v, terms[q]);
                }
                sum_in_rank_order<E, W>(rank, own, terms, total);
#pragma unroll
                for (int k = 1; k < W; ++k) send(rank_after<W>(rank, k), target, v, total);
                store_words(out, at, bytes, total);
            }
        }
        if (i >= 2) {
            const u32 length = tile_length(i - 2);
            for (u32 v = threadIdx.x; v < length; v += blockDim.x) {
                u32 sums[W][4];
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q != rank) take(place(sums_ring, i - 2, q), v, sums[q]);
                }
#pragma unroll
                for (int q = 0; q < W; ++q) {
                    if (q != rank) store_words(out, offset(q, i - 2, v), bytes, sums[q]);
                }
            }
        }
        if (i <= tiles) signals.signal_all(arena, number(i) + 1);
    }
    if (threadIdx.x == 0) *number_at = number(tiles + 1);
}

}  // namespace peerlane
