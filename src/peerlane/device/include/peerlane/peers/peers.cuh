// The eight primitives, as methods of what a team knows of its peers. Which order each of them guarantees is said at each.
//
// What goes wrong in hand-written protocols can not be written with them: a signal waits until the team's asynchronous stores have been
// written at their peers, not only read; it has one release fence however many ranks it tells; behind a wait both ordinary and asynchronous
// reads see what was signalled; polls are relaxed, with one acquiring load at their end, and end at the arena's time limit (arena.cuh says what holds behind such a wait).
//
//   peers.store_async(q, at, tile, bytes);    the same step in every rank's loop: push,
//   peers.signal(q, slot, number);            tell,
//   peers.wait(p, slot, number);              hear,
//   ... read what p pushed ...                use
//
// Offsets are bytes in the arena. Every method is called by all threads of the team together, with the same arguments.
#pragma once

#include <peerlane/peers/numeric.cuh>
#include <peerlane/peers/observe.cuh>
#include <peerlane/ptx/ptx_async.cuh>
#include <peerlane/peers/team.cuh>
#include <peerlane/peers/words.cuh>

namespace peerlane {

template <class E>
struct BulkAddOf;
template <>
struct BulkAddOf<Float32> { static constexpr ptx::BulkAdd type = ptx::BulkAdd::f32; };
template <>
struct BulkAddOf<Float16> { static constexpr ptx::BulkAdd type = ptx::BulkAdd::f16; };
template <>
struct BulkAddOf<BFloat16> { static constexpr ptx::BulkAdd type = ptx::BulkAdd::bf16; };
template <>
struct BulkAddOf<Int32> { static constexpr ptx::BulkAdd type = ptx::BulkAdd::u32; };

// Ranks as a set: bits by rank.
__device__ inline u32 only(int rank) { return 1u << rank; }
constexpr u32 every_rank = ~0u;

// `bytes` of each of `count` rows, `stride` bytes from one to the next.
struct Rows {
    u32 count, bytes, stride;
};

// To all ranks of a set (the caller is left out).
struct Signal {
    static constexpr bool needs_release = true;
    u32 ranks = 0, slot = 0, number = 0;

    __device__ bool any() const { return ranks != 0; }
};

// Where in every arena the flag lies that rank `source` raises, of those at `flags` (of less than 4 GiB); and that of rank `rank`.
template <int W>
__device__ inline u64 flag_offset(u64 flags, u32 slot, u32 source) { return flags + u64((slot * W + source) * line_bytes); }
template <int W>
__device__ inline u32* flag_of(const Arena& arena, u64 flags, int rank, u32 slot, u32 source) {
    return reinterpret_cast<u32*>(arena.peer(rank, flag_offset<W>(flags, slot, source)));
}

// Flags: one u32, on a line of its own, per (slot, source). flag_bytes(slots) of the arena at `flags`, zero at first. A flag holds a number
// that only grows and belongs to whoever numbers the events of that slot.
template <int W, class Team = Block>
class Peers {
  public:
    __device__ Peers(const Arena& arena, u64 flags, Team team = {}, u32 role = whole_block) : arena_(arena), flags_(flags), team_(team), role_(role) {}

    __device__ static constexpr u64 flag_bytes(u64 slots) { return slots * W * line_bytes; }

    // ---- stores: seen by a peer once it has waited for a later signal of this team ---------------------------------------------------

    // `bytes` of shared memory to `target` of rank `peer`, asynchronously. Multiples of 16 at 16-byte aligned addresses. What the team has
    // written to `tile` is taken along; the tile may be written again after `reuse_tiles` or a signal.
    __device__ void store_async(int peer, u64 target, const void* tile, u32 bytes) const {
        start_store(span_store);
        if (team_.thread() != 0) return;
        ptx::bulk_store(arena_.peer(peer, target), tile, bytes);
        ptx::bulk_commit();
    }

    // The same, adding to what is there, element by element, in no fixed order, in the precision of E: results may differ from run to run.
    // What was there before must have come in by a signal too.
    template <class E>
    __device__ void store_add_async(int peer, u64 target, const void* tile, u32 bytes) const {
        start_store(span_store);
        if (team_.thread() != 0) return;
        ptx::bulk_add<BulkAddOf<E>::type>(arena_.peer(peer, target), tile, bytes);
        ptx::bulk_commit();
    }

    // Rows of the caller's own memory to `target` of every other rank, as far apart there as here, by loads and stores of all threads. Multiples of
    // 16 at 16-byte aligned addresses, less than 4 GiB from the first to the last. Every vector is loaded once; several of a thread are on their
    // way at a time.
    __device__ void store_all(u64 target, const char* source, Rows rows) const {
        store_rows(source, rows, [&](const auto& store) {
#pragma unroll
            for (int k = 1; k < W; ++k) store(arena_.peer(rank_after<W>(arena_.rank, k), target));
        });
    }

    // The same to rank `peer` alone.
    __device__ void store_rows(int peer, u64 target, const char* source, Rows rows) const {
        store_rows(source, rows, [&](const auto& store) { store(arena_.peer(peer, target)); });
    }

    // The same to some targets: `each` calls what it gets with every one.
    template <class Each>
    __device__ void store_rows(const char* source, Rows rows, const Each& each) const {
        fuzz(arena_, role_, span_store);
        const Span span(arena_, role_, span_store, team_.thread() == 0);
        const u32 step = team_.size() * sizeof(Vec16), own = team_.thread() * sizeof(Vec16);
        u32 row = 0, first = 0;
        while (row < rows.count) {
            Vec16 vectors[at_once];
            u32 at[at_once];
#pragma unroll
            for (int v = 0; v < at_once; ++v) {
                const bool inside = row < rows.count && first + own < rows.bytes;
                at[v] = inside ? row * rows.stride + first + own : nowhere;
                if (inside) vectors[v] = *reinterpret_cast<const Vec16*>(source + at[v]);
                first += step;
                if (first >= rows.bytes) ++row, first = 0;
            }
            each([&](char* to) {
#pragma unroll
                for (int v = 0; v < at_once; ++v) {
                    if (at[v] != nowhere) *reinterpret_cast<Vec16*>(to + at[v]) = vectors[v];
                }
            });
        }
    }

    // Until the tiles of this team's stores may be written again. Says nothing about what peers see: that is what `signal` is for.
    __device__ void reuse_tiles() const {
        ptx::bulk_wait_read<0>();
        team_.sync();
    }

    // ---- loads: behind a wait for whatever wrote the source ----------------------------------------------------------------------------

    // `bytes` at `source` of rank `peer` (or of the caller's own memory) to shared memory, asynchronously; ends the phase of `barrier`, which
    // expects one arrival. Multiples of 16 at 16-byte aligned addresses; 0 bytes only end the phase. The team has finished with what the tile held.
    __device__ void load_async(void* tile, int peer, u64 source, u32 bytes, u64* barrier) const {
        load_async(tile, arena_.peer(peer, source), bytes, barrier);
    }
    __device__ void load_async(void* tile, const char* source, u32 bytes, u64* barrier) const {
        ptx::fence_proxy_async();
        team_.sync();
        if (team_.thread() != 0) return;
        ptx::mbarrier_arrive_expect(barrier, bytes);
        if (bytes > 0) ptx::bulk_load(tile, source, bytes, barrier);
    }

    // Until the load that ends the phase of this parity has landed; then every thread sees the tile.
    __device__ void wait_load(u64* barrier, u32 parity) const {
        LocalDeadline deadline;
        while (!ptx::mbarrier_try_wait(barrier, parity)) deadline.check();
    }

    // ---- sums: the same range of all ranks, in rank order, in fp32 (integers: as they are), rounded once --------------------------------

    // Sum of `bytes` at `source` of all ranks to local memory. Behind a wait for all of them; a source may be written again after a signal
    // from here. The source is 16-byte aligned; `bytes` is a multiple of the element size.
    template <class E>
    __device__ void reduce(char* target, u64 source, u64 bytes) const {
        fuzz(arena_, role_, span_reduce);
        const Span span(arena_, role_, span_reduce, team_.thread() == 0);
        const u64 vectors = (bytes + sizeof(Vec16) - 1) / sizeof(Vec16);
        for (u64 v = team_.thread(); v < vectors; v += team_.size()) {
            u32 total[4];
            sum_vector<E>(source, v, bytes, total);
            store_words(target, v * sizeof(Vec16), bytes, total);
        }
    }

    // Sum of `bytes` at `range` of all ranks into that range of all ranks: each sums its own part and stores it everywhere. Between two
    // barriers, or waits that say as much: before it all ranks have written, after it all have stored.
    template <class E>
    __device__ void all_reduce(u64 range, u64 bytes) const {
        fuzz(arena_, role_, span_reduce);
        const Span span(arena_, role_, span_reduce, team_.thread() == 0);
        const Part own = part_of((bytes + sizeof(Vec16) - 1) / sizeof(Vec16), arena_.rank, W);
        for (u64 v = own.first + team_.thread(); v < own.end; v += team_.size()) {
            u32 total[4];
            sum_vector<E>(range, v, bytes, total);
#pragma unroll
            for (int k = 0; k < W; ++k) store_words(arena_.peer(rank_after<W>(arena_.rank, k), range), v * sizeof(Vec16), bytes, total);
        }
    }

    // ---- signals and waits ---------------------------------------------------------------------------------------------------------------

    // All that this team has stored and read, at any rank, comes before what follows the matching wait at rank `peer`. Release, system scope.
    __device__ void signal(int peer, u32 slot, u32 number) const {
        finish_stores();
        if (team_.thread() != 0) return;
        release();
        ptx::store_relaxed_system(flag(peer, slot, arena_.rank), number);
    }

    // The same for every other rank, behind one fence.
    __device__ void signal_all(u32 slot, u32 number) const {
        finish_stores();
        if (team_.thread() != 0) return;
        release();
        tell_all(slot, number);
    }

    // The same for every other rank at each of the slots slot(0), ..., slot(count - 1), behind one fence.
    template <class Slot>
    __device__ void signal_all_slots(u32 count, const Slot& slot, u32 number) const {
        finish_stores();
        if (team_.thread() != 0) return;
        release();
        for (u32 i = 0; i < count; ++i) tell_all(slot(i), number);
    }

    // All that this team has read at rank `peer`, or in what that rank has pushed, may be written again behind the matching wait there. It says
    // nothing of stores, and waits for none: for data, `signal`.
    __device__ void acknowledge(int peer, u32 slot, u32 number) const {
        finish_reads();
        if (team_.thread() != 0) return;
        release();
        ptx::store_relaxed_system(flag(peer, slot, arena_.rank), number);
    }

    // The same for every other rank.
    __device__ void acknowledge_all(u32 slot, u32 number) const {
        finish_reads();
        if (team_.thread() != 0) return;
        release();
        tell_all(slot, number);
    }

    // Until rank `source` has signalled `number` or a later one here. Acquire, system scope, for ordinary and asynchronous reads.
    __device__ void wait(int source, u32 slot, u32 number) const {
        fuzz(arena_, role_, span_wait);
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        if (team_.thread() == 0) {
            poll(source, slot, number);
            ptx::fence_proxy_async();
        }
        team_.sync();
    }

    // The same, where the team keeps in `seen`, in shared memory, how far it knows each rank to have come (at first: no further than it has come). A
    // wait for what is known costs no fence and no poll; else one look at all flags of the slot is for all ranks. The team has at least W threads.
    __device__ void wait(int source, u32 slot, u32 number, u32 (&seen)[W]) const {
        fuzz(arena_, role_, span_wait);
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        if (reached(seen[source], number)) return;
        if (team_.thread() == 0) poll(source, slot, number);
        team_.sync();
        if (const u32 q = team_.thread(); q < W) {
            seen[q] = ptx::load_acquire_system(flag(arena_.rank, slot, q));
            ptx::fence_proxy_async();
        }
        team_.sync();
    }

    // Until rank `source` has, at each of the slots [first, first + count); the team's threads share them.
    __device__ void wait_slots(int source, u32 first, u32 count, u32 number) const {
        fuzz(arena_, role_, span_wait);
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        for (u32 slot = team_.thread(); slot < count; slot += team_.size()) poll(source, first + slot, number);
        team_.sync();
        ptx::fence_proxy_async();
    }

    // Until every other rank has, at each of these slots.
    __device__ void wait_all_slots(u32 first, u32 count, u32 number) const {
        fuzz(arena_, role_, span_wait);
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        for (u32 i = team_.thread(); i < (W - 1) * count; i += team_.size()) {
            poll(rank_after<W>(arena_.rank, 1 + static_cast<int>(i / count)), first + i % count, number);
        }
        team_.sync();
        ptx::fence_proxy_async();
    }

    // For a team that is a warp, whose lanes want flags of their own, or none: until the first that is wanted has come. Returns how many lanes from the
    // first one on want nothing more. One fence is for all of them; a wait for what came long ago would take longer than a step of a product.
    __device__ u32 wait_leading(bool wants, int source, u32 slot, u32 number) const {
        fuzz(arena_, role_, span_wait);
        const u32 wanting = __ballot_sync(full_warp, wants);
        if (wanting == 0) return warp_threads;
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        bool here = !wants;
        if (wants && (wanting & ((1u << team_.thread()) - 1)) == 0) {
            poll(source, slot, number);
            here = true;
        }
        team_.sync();
        if (!here && reached(ptx::load_relaxed_system(flag(arena_.rank, slot, source)), number)) {
            ptx::load_acquire_system(flag(arena_.rank, slot, source));
            here = true;
        }
        const u32 missing = __ballot_sync(full_warp, !here);
        ptx::fence_proxy_async();
        team_.sync();
        return missing ? __ffs(missing) - 1 : warp_threads;
    }

    // Until every other rank has.
    __device__ void wait_all(u32 slot, u32 number) const {
        fuzz(arena_, role_, span_wait);
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        if (team_.thread() < W) {
            for (u32 q = team_.thread(); q < W; q += team_.size()) {
                if (q != arena_.rank) poll(q, slot, number);
            }
            ptx::fence_proxy_async();
        }
        team_.sync();
    }

    // The same, where each thread q of the first W keeps how far it knows rank q to have come; it may want a number of its own. The team has at
    // least W threads.
    __device__ void wait_all(u32 slot, u32 number, u32& seen) const {
        fuzz(arena_, role_, span_wait);
        const Span span(arena_, role_, span_wait, team_.thread() == 0);
        if (const u32 q = team_.thread(); q < W && q != arena_.rank && !reached(seen, number)) {
            seen = poll(q, slot, number);
            ptx::fence_proxy_async();
        }
        team_.sync();
    }

    // Every rank's team at this slot has come here: what each did before comes before what any does after.
    __device__ void barrier(u32 slot, u32 number) const {
        signal_all(slot, number);
        wait_all(slot, number);
    }

  protected:
    static constexpr int at_once = W == 2 ? 6 : W <= 4 ? 4 : 2;  // vectors of a thread that come in; W - 1 times as many go out
    static constexpr u32 nowhere = ~0u;

    __device__ u32* flag(int rank, u32 slot, u32 source) const { return flag_of<W>(arena_, flags_, rank, slot, source); }

    __device__ void start_store(u32 kind) const {
        fuzz(arena_, role_, kind);
        ptx::fence_proxy_async_shared();
        team_.sync();
    }

    // Each thread waits for the stores that it has started itself; behind the barrier all of the team's are at their peers.
    __device__ void finish_stores() const {
        fuzz(arena_, role_, span_signal);
        ptx::bulk_wait<0>();
        team_.sync();
    }

    // Behind the barrier all of the team's reads are done: what bulk copies read, whoever waited for them knows.
    __device__ void finish_reads() const {
        fuzz(arena_, role_, span_signal);
        team_.sync();
    }

    // Behind a release.
    __device__ void tell_all(u32 slot, u32 number) const {
#pragma unroll
        for (int k = 1; k < W; ++k) ptx::store_relaxed_system(flag(rank_after<W>(arena_.rank, k), slot, arena_.rank), number);
    }

    // Behind a release.
    __device__ void give(const Signal& signal) const {
        const auto [ranks, slot, number] = signal;
#pragma unroll
        for (int k = 1; k < W; ++k) {
            const int q = rank_after<W>(arena_.rank, k);
            if (ranks >> q & 1) ptx::store_relaxed_system(flag(q, slot, arena_.rank), number);
        }
    }

    __device__ void release() const {
        ptx::fence_proxy_async();
        ptx::fence_system();
    }

    // What the flag said when it was enough, or `number` where the wait ended early: it is not waited for again. Acquire, for ordinary reads;
    // asynchronous ones need a proxy fence behind it.
    __device__ u32 poll(u32 source, u32 slot, u32 number) const {
        const u32* place = flag(arena_.rank, slot, source);
        Deadline deadline;
        u32 seen;
        while (!reached(seen = ptx::load_relaxed_system(place), number)) {
            if (deadline.ends(arena_, Awaited{role_, source, slot, number}, seen)) {
                seen = number;
                break;
            }
        }
        ptx::load_acquire_system(place);
        return seen;
    }

    template <class E>
    __device__ void sum_vector(u64 source, u64 v, u64 bytes, u32 (&total)[4]) const {
        u32 own[4], terms[W][4];
        load_words(arena_.local(source), v * sizeof(Vec16), bytes, own);
#pragma unroll
        for (int q = 0; q < W; ++q) {
            if (q != arena_.rank) load_words(arena_.peer(q, source), v * sizeof(Vec16), bytes, terms[q]);
        }
        sum_in_rank_order<E, W>(arena_.rank, own, terms, total);
    }

    const Arena& arena_;
    u64 flags_;
    Team team_;
    u32 role_;
};

}  // namespace peerlane
