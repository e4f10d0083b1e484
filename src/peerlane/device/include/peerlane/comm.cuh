// Messages between the ranks of an arena: epochs, packets, signals, and waits that end.
//
// Three rules hold throughout. Flags and epochs only grow and are never reset. The epoch of a launch lives in device memory and is advanced
// by the kernel itself, so a captured graph can be replayed. Every wait has a deadline; when it expires the kernel leaves a record where the
// host can read it, and traps.
#pragma once

#include <peerlane/ptx.cuh>

namespace peerlane {

constexpr int max_ranks = 8;
constexpr int line_bytes = 128;

// What a wait that ran out of time leaves behind. Lies in pinned host memory; `set` is written last.
struct FaultRecord {
    u32 set, rank, source, block, slot, expected, seen;
};

// The symmetric allocation as a kernel argument; mirrors `peerlane.device.arena.ArenaView`.
// base[q] is where rank q's copy is mapped here. The first line of every copy is reserved for `fail`.
struct Arena {
    char* base[max_ranks];
    u32 rank;
    u32 world_size;
    u64 timeout_ns;
    FaultRecord* fault;

    __device__ char* local(u64 offset) const { return base[rank] + offset; }
    __device__ char* peer(int q, u64 offset) const { return base[q] + offset; }
};

// Report a wait that will not end and stop the kernel. The first thread to come writes the record; the others give it time to do so.
[[noreturn]] __device__ inline void fail(const Arena& arena, u32 source, u32 slot, u32 expected, u32 seen) {
    if (ptx::exchange_relaxed_system(reinterpret_cast<u32*>(arena.local(0)), 1u) == 0) {
        FaultRecord* record = arena.fault;
        ptx::store_relaxed_system(&record->rank, arena.rank);
        ptx::store_relaxed_system(&record->source, source);
        ptx::store_relaxed_system(&record->block, blockIdx.x);
        ptx::store_relaxed_system(&record->slot, slot);
        ptx::store_relaxed_system(&record->expected, expected);
        ptx::store_relaxed_system(&record->seen, seen);
        ptx::fence_system();
        ptx::store_relaxed_system(&record->set, 1u);
        ptx::fence_system();
    } else {
        const u64 grace_ends = ptx::globaltimer() + 50'000'000;
        while (ptx::globaltimer() < grace_ends) ptx::sleep(1000);
    }
    ptx::trap();
}

// The budget of one wait. The clock is read rarely, so that a short wait costs no clock read at all.
class Deadline {
  public:
    __device__ bool expired(const Arena& arena) {
        if ((++tries_ & 1023u) != 0) return false;
        const u64 now = ptx::globaltimer();
        if (end_ == 0) end_ = now + arena.timeout_ns;
        return now > end_;
    }

  private:
    u64 end_ = 0;
    u32 tries_ = 0;
};

// ---- epochs --------------------------------------------------------------------------------------------------------------------------

constexpr int max_epoch_blocks = 256;
constexpr u32 first_epoch = 2;

// The number of this launch among all launches that use `counters` (u32[max_epoch_blocks], local, zero at first), and the advance to the
// next. Call once, by all threads of all blocks; grids of up to max_epoch_blocks, launched in one stream order, which may differ in size.
//
// Block b reads only counter b, and advances counters b, b + grid, b + 2 grid, ...: all counters stay equal, whatever the grids were, and no
// block reads what another one writes in the same launch. Zero stands for "never written", and skipping two numbers keeps parity alternating
// when the 32 bits wrap.
__device__ inline u32 next_epoch(u32* counters) {
    const u32 last = counters[blockIdx.x];
    const u32 epoch = last < first_epoch || last == 0xffffffffu ? first_epoch : last + 1;
    __syncthreads();
    for (u32 c = blockIdx.x + threadIdx.x * gridDim.x; c < max_epoch_blocks; c += blockDim.x * gridDim.x) counters[c] = epoch;
    return epoch;
}

// ---- packets: twelve bytes of data and their epoch in one indivisible store ------------------------------------------------------------
//
// The flag travels with the data, so there is no fence, no barrier and one trip over the link; three quarters of the bytes are data.
// A packet's place is free to be written again in the epoch after next (two alternating buffers) if every rank's completion of an epoch
// implies that every other rank has begun it.

constexpr int packet_words = 3;
constexpr int packet_data_bytes = 4 * packet_words;

__device__ inline void push_packet(char* place, const u32 (&data)[packet_words], u32 epoch) {
    ptx::store_relaxed_system(reinterpret_cast<Vec16*>(place), Vec16{{data[0], data[1], data[2], epoch}});
}

// Wait for the packet of every other rank q at `first + q * stride` (local memory); element `rank` of the result is left alone.
// `slot` only names the wait in a fault record.
template <int W>
__device__ inline void pull_packets(const Arena& arena, const char* first, u64 stride, u32 slot, u32 epoch, u32 (&data)[W][packet_words]) {
    Deadline deadline;
    while (true) {
        u32 seen[W];
#pragma unroll
        for (int q = 0; q < W; ++q) {
            seen[q] = epoch;
            if (q == arena.rank) continue;
            const Vec16 packet = ptx::load_relaxed_system(reinterpret_cast<const Vec16*>(first + q * stride));
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
        if (deadline.expired(arena)) fail(arena, missing, slot, epoch, stale);
    }
}

// ---- signals: one flag, on a line of its own, per (block, source) ------------------------------------------------------------------------
//
// A flag holds a number that only grows; comparing the signed difference survives the wrap.

template <int W>
struct Signals {
    u64 offset;  // of the flags in the arena, gridDim.x * W lines

    __device__ u32* flag(char* base, u32 source) const {
        return reinterpret_cast<u32*>(base + offset + (u64(blockIdx.x) * W + source) * line_bytes);
    }

    // What this block has read and written so far happens before what follows the matching wait in the same block of every other rank.
    // Call by all threads of the block.
    __device__ void signal_all(const Arena& arena, u32 number) const {
        __syncthreads();
        if (threadIdx.x < W && threadIdx.x != arena.rank) {
            ptx::fence_system();
            ptx::store_relaxed_system(flag(arena.base[threadIdx.x], arena.rank), number);
        }
    }

    // Until every other rank's block has signalled `number` or a later one. Call by all threads of the block.
    __device__ void wait_all(const Arena& arena, u32 number) const {
        if (threadIdx.x < W && threadIdx.x != arena.rank) {
            const u32* place = flag(arena.base[arena.rank], threadIdx.x);
            Deadline deadline;
            u32 seen;
            while (static_cast<int>((seen = ptx::load_relaxed_system(place)) - number) < 0) {
                if (deadline.expired(arena)) fail(arena, threadIdx.x, blockIdx.x * W + threadIdx.x, number, seen);
            }
            ptx::fence_system();
        }
        __syncthreads();
    }
};

}  // namespace peerlane
