// The memory that all ranks of a group can address, the number of a launch, and waits that end.
//
// Three rules hold throughout the kit. Flags and epochs only grow and are never reset. The epoch of a launch lives in device memory and is
// advanced by the kernel itself, so a captured graph can be replayed. Every wait for another rank ends: when what it waits for has come, when
// the group's time limit has passed, or when the host tells it to stop. A wait that ends early leaves a record where the host can read it.
//
// Behind a wait that ended early the kernel runs on to its end, for barriers of a block must be met. What it stores may be wrong; where it
// stores must not be: `all_arrived` tells whether an address or a count may be taken from what other blocks or ranks have written.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {

constexpr int max_ranks = 8;
constexpr int line_bytes = 128;

// What a part of a block does. Names waits in fault records and tracks in timelines; mirrors `peerlane.device.host.arena.ROLES`.
enum Role : u32 { whole_block, loader, consumer, storer, communicator };

// What a wait that ended early leaves behind, and what waits ask of the host. Lies in pinned host memory, one for each arena. `set`, a
// WaitEnd, is written last. Mirrors `peerlane.device.host.waits.WaitRecord`.
struct FaultRecord {
    u32 set, rank, role, source, block, slot, expected, seen;
    u64 limit_ns;  // of a wait; the host may change it at any time
    u32 traps;     // whether a wait that runs out of time traps, so that the process loses its context
    u32 stop;      // where the group has no word of its own for this: waits end when it is set
};

// Why a wait ends before what it waits for has come.
enum WaitEnd : u32 { goes_on, out_of_time, told_to_stop };

// One stamp of a timeline: when, who (role << 24 | block) and what (span << 1 | 1 at the end of the span).
struct alignas(16) TimelineEvent {
    u64 nanoseconds;
    u32 who, what;
};

// The symmetric allocation as a kernel argument; mirrors `peerlane.device.host.arena.ArenaView`.
// base[q] is where rank q's copy is mapped here. The first line of every copy is reserved for `give_up`.
struct Arena {
    char* base[max_ranks];
    u32 rank;
    u32 world_size;
    u32* stop;  // in host memory: set once the group's ranks are to wait for each other no more
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

// Words of the first line of every rank's copy.
constexpr u64 reported_at = 0;  // a thread of this rank has written the record
constexpr u64 ended_at = 4;     // a wait of some rank has ended early

// Whether no wait of this arena has ended early, on any rank whose signals the caller has waited for. Behind a wait, and before the first
// address or count that is taken from what others have written: where the answer is no, there may be nothing of it.
__device__ inline bool all_arrived(const Arena& arena) { return ptx::load_relaxed_system(reinterpret_cast<const u32*>(arena.local(ended_at))) == 0; }

// The same by all threads of a block, which get one answer: of this arena, or of another one's word at ended_at.
__device__ inline bool block_arrived(const u32* ended) {
    __shared__ u32 arrived;
    __syncthreads();
    if (threadIdx.x == 0) arrived = ptx::load_relaxed_system(ended) == 0;
    __syncthreads();
    return arrived != 0;
}
__device__ inline bool block_arrived(const Arena& arena) { return block_arrived(reinterpret_cast<const u32*>(arena.local(ended_at))); }

// By a trap. The record may be another thread's, which gets time to write it.
[[noreturn]] __device__ inline void stop_kernel() {
    const u64 begin = ptx::globaltimer();
    while (ptx::globaltimer() - begin < 50'000'000) ptx::sleep(1000);
    ptx::trap();
}

// Report a wait that ends early. The first thread to come writes the record. Every rank knows of it before it sees anything that this thread,
// or others that follow it, store from here on: so no rank takes garbage for data.
__device__ inline void give_up(const Arena& arena, const Awaited& awaited, u32 seen, WaitEnd end) {
    FaultRecord* record = arena.fault;
    if (ptx::exchange_relaxed_system(reinterpret_cast<u32*>(arena.local(reported_at)), 1u) == 0) {
        ptx::store_relaxed_system(&record->rank, arena.rank);
        ptx::store_relaxed_system(&record->role, awaited.role);
        ptx::store_relaxed_system(&record->source, awaited.source);
        ptx::store_relaxed_system(&record->block, blockIdx.x);
        ptx::store_relaxed_system(&record->slot, awaited.slot);
        ptx::store_relaxed_system(&record->expected, awaited.expected);
        ptx::store_relaxed_system(&record->seen, seen);
        ptx::fence_system();
        ptx::store_relaxed_system(&record->set, static_cast<u32>(end));
        ptx::fence_system();
    }
#pragma unroll 1
    for (u32 q = 0; q < arena.world_size; ++q) ptx::store_relaxed_system(reinterpret_cast<u32*>(arena.peer(q, ended_at)), 1u);
    ptx::store_relaxed_system(arena.stop, 1u);
    ptx::fence_system();
    if (end == out_of_time && ptx::load_relaxed_system(&record->traps) != 0) stop_kernel();
}

// The same for a kernel that can not go on: its process loses the device.
[[noreturn]] __device__ inline void fail(const Arena& arena, const Awaited& awaited, u32 seen) {
    give_up(arena, awaited, seen, out_of_time);
    stop_kernel();
}

// Polls between two looks at the clock and the host, a power of two; tests take fewer.
#ifndef PEERLANE_POLLS
#define PEERLANE_POLLS 1024
#endif

// The budget of one wait. Clock and host are asked rarely, so that a short wait costs neither.
class Deadline {
  public:
    // Behind a poll that saw `seen`, which was not enough: whether the wait ends all the same. Then it has been reported, and the caller goes on.
    __device__ bool ends(const Arena& arena, const Awaited& awaited, u32 seen) {
        const WaitEnd end = look(arena);
        if (end != goes_on) give_up(arena, awaited, seen, end);
        return end != goes_on;
    }

    // The same without a report, for a caller who calls `fail`.
    __device__ bool expired(const Arena& arena) { return look(arena) != goes_on; }

  private:
    __device__ WaitEnd look(const Arena& arena) {
        if ((++tries_ & (PEERLANE_POLLS - 1u)) != 0) return goes_on;
        const u64 now = ptx::globaltimer();
        if (begin_ == 0) begin_ = now;
        if (ptx::load_relaxed_system(arena.stop) != 0) return told_to_stop;
        return now - begin_ > ptx::load_relaxed_system(&arena.fault->limit_ns) ? out_of_time : goes_on;
    }

    u64 begin_ = 0;
    u32 tries_ = 0;
};

// A wait for what the caller's own block, or its copies, will do. It ends when they have done it, for their waits end. So this budget is longer than
// any group's limit, and only stops a kernel that is wrong in itself.
class LocalDeadline {
  public:
    __device__ void check() {
        if ((++tries_ & 4095u) != 0) return;
        const u64 now = ptx::globaltimer();
        if (begin_ == 0) begin_ = now;
        if (now - begin_ > budget_ns) ptx::trap();
    }

  private:
    static constexpr u64 budget_ns = 86'400'000'000'000;  // a day; the host allows no group a longer limit
    u64 begin_ = 0;
    u32 tries_ = 0;
};

// Whether `seen` has come as far as `expected`, of numbers that only grow; survives the wrap of 32 bits.
__device__ inline bool reached(u32 seen, u32 expected) { return static_cast<int>(seen - expected) >= 0; }

// ---- epochs --------------------------------------------------------------------------------------------------------------------------

#ifndef MAX_EPOCH_BLOCKS
#define MAX_EPOCH_BLOCKS 256
#endif
constexpr int max_epoch_blocks = MAX_EPOCH_BLOCKS;
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
