// What the protocols here have in common. Each is right as long as `twin` is `honest`, and wrong in one way for every other value.
#pragma once

#include <peerlane/comm.cuh>

using namespace peerlane;

// Offsets in the arena. Every block of every rank has flags of its own, a line for each source, and an epoch of its own.
struct Places {
    u64 data, flags, epochs;
};

__device__ inline u32* flag(const Arena& arena, const Places& at, int owner, u32 source) {
    return reinterpret_cast<u32*>(arena.peer(owner, at.flags + (u64(blockIdx.x) * max_ranks + source) * line_bytes));
}

// What a rank sends in an epoch: different for every rank, epoch and place.
__device__ inline u32 message(u32 rank, u32 epoch, u32 place) { return rank << 24 | epoch << 16 | place; }

// Until the flag has reached the number, however far it went. By one thread; the caller fences.
__device__ inline void wait_for(const Arena& arena, const u32* place, u32 source, u32 number) {
    Deadline deadline;
    u32 seen;
    while (static_cast<int>((seen = ptx::load_relaxed_system(place)) - number) < 0) {
        if (deadline.expired(arena)) fail(arena, Awaited{whole_block, source, blockIdx.x, number}, seen);
    }
}
