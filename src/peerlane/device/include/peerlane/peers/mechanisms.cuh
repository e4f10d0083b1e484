// One kernel per way to move data between GPUs, each doing nothing else, so that its rate is that of the mechanism; and round trips.
//
// `count` peers take equal parts of `bytes`, which is a multiple of 16 * count; every block does a part of each. `data` is an offset in the
// arena, `local` the caller's own memory.
#pragma once

#include <peerlane/comm.cuh>

namespace peerlane {

constexpr u32 bench_tile_bytes = 16384;
constexpr u32 bench_stages = 4;

// This block's part of what goes to each peer, in bytes.
__device__ inline Part bench_part(u64 bytes, u32 count) {
    const Part vectors = part_of(bytes / count / sizeof(Vec16), blockIdx.x, gridDim.x);
    return {vectors.first * sizeof(Vec16), vectors.end * sizeof(Vec16)};
}

template <int W>
__device__ inline void bench_sm_store(const Arena& arena, u64 data, char* local, u64 bytes, u32 count) {
    const Part part = bench_part(bytes, count);
    for (u32 k = 0; k < count; ++k) {
        const u64 at = k * (bytes / count) + part.first;
        copy_bytes(Block{}, arena.peer(rank_after<W>(arena.rank, k + 1), data + at), local + at, part.end - part.first);
    }
}

template <int W>
__device__ inline void bench_sm_load(const Arena& arena, u64 data, char* local, u64 bytes, u32 count) {
    const Part part = bench_part(bytes, count);
    for (u32 k = 0; k < count; ++k) {
        const u64 at = k * (bytes / count) + part.first;
        copy_bytes(Block{}, local + at, arena.peer(rank_after<W>(arena.rank, k + 1), data + at), part.end - part.first);
    }
}

// A warp per block, always the same tile of shared memory: nothing but the stores is measured. Call with one warp.
template <int W, bool adds>
__device__ inline void bench_bulk_store(const Arena& arena, u64 flags, u64 data, u64 bytes, u32 count) {
    char* tile = ptx::dynamic_shared();
    for (u32 at = threadIdx.x * 4; at < bench_tile_bytes; at += blockDim.x * 4) *reinterpret_cast<u32*>(tile + at) = 0;
    const Peers<W, Warp> peers(arena, flags);
    const Part part = bench_part(bytes, count);
    for (u64 at = part.first; at < part.end; at += bench_tile_bytes) {
        const u32 length = part.end - at < bench_tile_bytes ? static_cast<u32>(part.end - at) : bench_tile_bytes;
        for (u32 k = 0; k < count; ++k) {
            const u64 target = data + k * (bytes / count) + at;
            if constexpr (adds) {
                peers.template store_add_async<Float32>(rank_after<W>(arena.rank, k + 1), target, tile, length);
            } else {
                peers.store_async(rank_after<W>(arena.rank, k + 1), target, tile, length);
            }
        }
    }
    // Nobody waits for it; it ends when all stores are where they belong.
    peers.signal_all(blockIdx.x, 1);
}

// bench_stages loads under way at a time. Call with one warp.
template <int W>
__device__ inline void bench_bulk_load(const Arena& arena, u64 flags, u64 data, u64 bytes, u32 count) {
    __shared__ alignas(8) u64 barriers[bench_stages];
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < bench_stages; ++stage) ptx::mbarrier_init(barriers + stage, 1);
        ptx::mbarrier_init_fence();
    }
    __syncwarp();
    const Peers<W, Warp> peers(arena, flags);
    const Part part = bench_part(bytes, count);
    const u32 tiles = static_cast<u32>((part.end - part.first + bench_tile_bytes - 1) / bench_tile_bytes) * count;
    const auto finish = [&](u32 turn) { peers.wait_load(barriers + turn % bench_stages, turn / bench_stages & 1); };
    for (u32 turn = 0; turn < tiles; ++turn) {
        if (turn >= bench_stages) finish(turn - bench_stages);
        const u64 at = part.first + u64(turn / count) * bench_tile_bytes;
        const u32 length = part.end - at < bench_tile_bytes ? static_cast<u32>(part.end - at) : bench_tile_bytes;
        const u32 k = turn % count;
        char* tile = ptx::dynamic_shared() + turn % bench_stages * bench_tile_bytes;
        peers.load_async(tile, rank_after<W>(arena.rank, k + 1), data + k * (bytes / count) + at, length, barriers + turn % bench_stages);
    }
    for (u32 turn = tiles < bench_stages ? 0 : tiles - bench_stages; turn < tiles; ++turn) finish(turn);
}

// ---- round trips: `rounds` of them from `number` on, on all ranks at once; one block of one warp -----------------------------------------

// Ranks 0 and 1 pass a flag to and fro.
template <int W>
__device__ inline void bench_flag(const Arena& arena, u64 flags, u32 number, u32 rounds) {
    if (arena.rank > 1) return;
    const int other = arena.rank ^ 1;
    const Peers<W, Warp> peers(arena, flags);
    for (u32 round = 1; round <= rounds; ++round) {
        if (arena.rank == 0) peers.signal(other, 0, number + round);
        peers.wait(other, 0, number + round);
        if (arena.rank == 1) peers.signal(other, 0, number + round);
    }
}

// Ranks 0 and 1 pass a packet to and fro.
template <int W>
__device__ inline void bench_packet(const Arena& arena, u64 packets, u32 number, u32 rounds) {
    if (arena.rank > 1 || threadIdx.x != 0) return;
    const int other = arena.rank ^ 1;
    u32 data[packet_words] = {};
    for (u32 round = 1; round <= rounds; ++round) {
        if (arena.rank == 0) push_packet(arena.peer(other, packets), data, number + round);
        pull_packet(arena, other, arena.local(packets), 0, number + round, data);
        if (arena.rank == 1) push_packet(arena.peer(other, packets), data, number + round);
    }
}

// All ranks.
template <int W>
__device__ inline void bench_barrier(const Arena& arena, u64 flags, u32 number, u32 rounds) {
    const Peers<W, Warp> peers(arena, flags);
    for (u32 round = 1; round <= rounds; ++round) peers.barrier(1, number + round);
}

}  // namespace peerlane
