// The memory that all ranks of a group can address, the number of a launch, and waits that end.
//
// Three rules hold throughout the kit. Flags and epochs only grow and are never reset. The epoch of a launch lives in device memory and is
// advanced by the kernel itself, so a captured graph can be replayed. Every wait has a deadline; when it expires the kernel leaves a record
// where the host can read it, and traps.
#pragma once

#include <peerlane/ptx.cuh>

namespace peerlane {

constexpr int max_ranks = 8;
constexpr int line_bytes = 128;

// What a part of a block does. Names waits in fault records and tracks in timelines; mirrors `peerlane.device.host.arena.ROLES`.
enum Role : u32 { whole_block, loader, consumer, storer, communicator };

// What a wait that ran out of time leaves behind. Lies in pinned host memory; `set` is written last.
struct FaultRecord {
    u32 set, rank, role, source, block, slot, expected, seen;
};

// One stamp of a timeline: when, who (role << 24 | block) and what (span << 1 | 1 at the end of the span).
struct alignas(16) TimelineEvent {
    u64 nanoseconds;
    u32 who, what;
};

// The symmetric allocation as a kernel argument; mirrors `peerlane.device.host.arena.ArenaView`.
// base[q] is where rank q's copy is mapped here. The first line of every copy is reserved for `fail`.
struct Arena {
    char* base[max_ranks];
    u32 rank;
    u32 world_size;
    u64 timeout_ns;
    FaultRecord* fault;
    TimelineEvent* timeline;  // a ring of timeline_events, behind one event whose first word counts; null where nothing is recorded
    u64 timeline_events;

    __device__ char* local(u64 offset) const { return base[rank] + offset; }
    __device__ char* peer(int q, u64 offset) const { return base[q] + offset; }
};

// The k-th rank after `rank`: every rank starts with another peer, so that no port is met by all at once.
template <int W>
__device__ inline int rank_after(u32 rank, int k) {
    const int q = static_cast<int>(rank) + k;
    return q < W ? q : q - W;
}

// ---- waits that end ------------------------------------------------------------------------------------------------------------------

// What a wait waits for, as a fault record tells it.
struct Awaited {
    u32 role, source, slot, expected;
};

// Report a wait that will not end and stop the kernel. The first thread to come writes the record; the others give it time to do so.
[[noreturn]] __device__ inline void fail(const Arena& arena, const Awaited& awaited, u32 seen) {
    if (ptx::exchange_relaxed_system(reinterpret_cast<u32*>(arena.local(0)), 1u) == 0) {
        FaultRecord* record = arena.fault;
        ptx::store_relaxed_system(&record->rank, arena.rank);
        ptx::store_relaxed_system(&record->role, awaited.role);
        ptx::store_relaxed_system(&record->source, awaited.source);
        ptx::store_relaxed_system(&record->block, blockIdx.x);
        ptx::store_relaxed_system(&record->slot, awaited.slot);
        ptx::store_relaxed_system(&record->expected, awaited.expected);
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

// Whether `seen` has come as far as `expected`, of numbers that only grow; survives the wrap of 32 bits.
__device__ inline bool reached(u32 seen, u32 expected) { return static_cast<int>(seen - expected) >= 0; }

// ---- epochs --------------------------------------------------------------------------------------------------------------------------

constexpr int max_epoch_blocks = 256;
constexpr u32 first_epoch = 2;

// The number of this launch among all launches that use `counters` (u32[max_epoch_blocks], local, zero at first), and the advance to the
// next. Call once, by all threads of all blocks; grids of up to max_epoch_blocks, launched in one stream order, which may differ in size.
// A launch that takes `count` numbers, the same on all ranks, gets the first of them; the others follow it without a gap.
//
// Block b reads only counter b, and advances counters b, b + grid, b + 2 grid, ...: all counters stay equal, whatever the grids were, and no
// block reads what another one writes in the same launch. Zero stands for "never written". Where the numbers left in 32 bits are too few for
// the launch, it begins again with first_epoch or the one behind it, whichever keeps parity alternating.
__device__ inline u32 next_epoch(u32* counters, u32 count = 1) {
    const u32 last = counters[blockIdx.x];
    const u32 again = first_epoch + (last % 2 == 0 && last != 0 ? 1 : 0);
    const u32 epoch = last == 0 || 0xffffffffu - last < count ? again : last + 1;
    __syncthreads();
    for (u32 c = blockIdx.x + threadIdx.x * gridDim.x; c < max_epoch_blocks; c += blockDim.x * gridDim.x) counters[c] = epoch + count - 1;
    return epoch;
}

}  // namespace peerlane
