// Progress that a warp of its own tells to other ranks, so that who moves data never waits for a release.
//
// A release fence takes microseconds, more where its SM has much under way. A team that moves tiles posts how far it has come, a number in shared
// memory, and goes on. The telling warp looks at all that is posted in its block; when a number has grown it fences once, for all of them, and
// raises the flags. How many tiles one signal speaks for follows from how long a fence takes.
//
//   __shared__ Progress<W> progress[2];
//   progress[0].begin(q, flags, slot, counters + q, tiles);    thread q, for every q < W; then __syncthreads()
//   if (warp == 0) {
//       for (...) { ...; post(progress[0], ++steps); }        one thread, behind what it speaks for
//   } else if (warp == last) {
//       tell_progress<W, 2>(arena, progress);                 until all that was announced in `begin` has been told
//   }
//
// Order: as if the thread that posts had signalled, behind its own reads, loads and stores, bulk ones that it has waited for among them, and those of
// threads that it has met at a barrier. (It releases to the telling warp, which releases to the system: causality is transitive.)
#pragma once

#include <peerlane/peers/peers.cuh>

namespace peerlane {

// What one team tells, in shared memory: flags of one slot at the ranks that it concerns. A rank's flag counts the steps that concern it, over all
// launches: of this launch those up to `steps[rank]`, from `first[rank]` on.
template <int W>
struct Progress {
    u64 flags;
    u32 slot;
    u32 reached;  // the steps that are done: what is posted
    u32 first[W], steps[W];

    // For rank q, which is to hear of `count` steps; 0: of none. `counter` keeps what it has heard of between launches.
    __device__ void begin(int q, u64 flags_at, u32 slot_number, u32* counter, u32 count) {
        if (q == 0) flags = flags_at, slot = slot_number, reached = 0;
        first[q] = *counter;
        steps[q] = count;
        if (count > 0) *counter = first[q] + count;
    }
};

// By one thread, behind what it speaks for: this many steps are done.
template <int W>
__device__ inline void post(Progress<W>& progress, u32 reached) { ptx::store_release_block(&progress.reached, reached); }

// By one warp. It lives as long as its block posts, whose teams' waits end.
template <int W, int lines>
__device__ inline void tell_progress(const Arena& arena, const Progress<W> (&progress)[lines]) {
    static_assert(W <= warp_threads);
    const u32 q = Warp{}.thread();
    u32 told[lines] = {};
    LocalDeadline deadline;
    while (true) {
        u32 done[lines] = {};
        bool news = false, open = false;
        if (q < W) {
#pragma unroll
            for (int line = 0; line < lines; ++line) {
                const u32 reached = ptx::load_relaxed_block(&progress[line].reached), steps = progress[line].steps[q];
                done[line] = reached < steps ? reached : steps;
                news |= done[line] != told[line];
                open |= done[line] != steps;
            }
        }
        if (__any_sync(0xffffffffu, news)) {
            fuzz(arena, communicator, span_signal);
            const Span span(arena, communicator, span_signal, q == 0);
            ptx::fence_proxy_async();
            ptx::fence_system();
#pragma unroll
            for (int line = 0; line < lines; ++line) {
                if (done[line] == told[line]) continue;
                const Progress<W>& own = progress[line];
                ptx::store_relaxed_system(flag_of<W>(arena, own.flags, q, own.slot, arena.rank), own.first[q] + done[line]);
                told[line] = done[line];
            }
            deadline = LocalDeadline{};
        } else {
            deadline.check();
        }
        if (!__any_sync(0xffffffffu, open)) return;
    }
}

}  // namespace peerlane
