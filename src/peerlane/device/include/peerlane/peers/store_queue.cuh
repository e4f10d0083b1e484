// Bulk stores one behind the other, with signals among them that do not stop the flow.
//
// A signal of `Peers` waits until every store has been written at its target, which takes a trip over the link; meanwhile nothing is sent. Here a
// signal is owed: it is given as soon as the stores that came before it have been written, while newer ones are on their way.
//
//   StoreQueue<W, 2, Warp> queue(arena, flags, Warp{}, storer);
//   for (...) {
//       queue.store(q, at, tile, bytes);               a step: any number of stores, to any ranks
//       queue.end_step(Signal{only(q), slot, number});       and at most one signal, of all steps so far
//   }
//   queue.flush();
//
// Order: as if end_step were Peers::signal. What the team has stored and read before end_step, at any rank, comes before what follows the matching
// wait. The queue counts steps itself, so a signal can not come before its stores. It may come late: whoever blocks until somebody else has
// had a signal that may still be owed flushes first, or argues why the other side can do without.
//
// In place of signals a step may end with a Post, the queue's third kind of argument: what is then owed is a post of progress, which a telling warp
// turns into signals, and no fence stops the team at all.
//
//   StoreQueue<W, 2, Warp, Post<W>> queue(arena, flags);
//   ... queue.end_step(Post<W>{&progress, steps});
//
// A thread's stores are counted in the order in which they are started. So the team's first thread starts no other bulk stores until `flush`.
#pragma once

#include <peerlane/peers/peers.cuh>
#include <peerlane/peers/progress.cuh>

namespace peerlane {

template <int W>
struct Post {
    static constexpr bool needs_release = false;  // it is one
    Progress<W>* progress = nullptr;
    u32 reached = 0;

    __device__ bool any() const { return progress != nullptr; }
};

// `in_flight`: steps that may be under way behind an end_step. `News`: what steps may end with, a Signal or a Post.
template <int W, int in_flight, class Team = Warp, class News = Signal>
class StoreQueue : Peers<W, Team> {
    static_assert(in_flight >= 1);
    using Base = Peers<W, Team>;

  public:
    __device__ StoreQueue(const Arena& arena, u64 flags, Team team = {}, u32 role = storer) : Base(arena, flags, team, role) {}

    // As Peers::store_async, but for when the tile may be written again: see end_step.
    __device__ void store(int peer, u64 target, const void* tile, u32 bytes) { store(this->arena_.peer(peer, target), tile, bytes); }

    // The same to an address: the caller's own memory, or a peer's.
    __device__ void store(char* target, const void* tile, u32 bytes) {
        this->start_store(span_store);
        if (bytes > 0 && this->team_.thread() == 0) ptx::bulk_store(target, tile, bytes);
    }

    // The same to one place in the memory of every other rank.
    __device__ void store_all(u64 target, const void* tile, u32 bytes) {
        this->start_store(span_store);
        if (this->team_.thread() != 0) return;
#pragma unroll
        for (int k = 1; k < W; ++k) ptx::bulk_store(this->arena_.peer(rank_after<W>(this->arena_.rank, k), target), tile, bytes);
    }

    // Ends the step. Behind it all stores but those of the newest `in_flight` steps have been written, what these older steps ended with has
    // been told, and their tiles may be written again.
    __device__ void end_step(const News& newest = News{}) {
        fuzz(this->arena_, this->role_, span_signal);
        this->team_.sync();
        if (this->team_.thread() == 0) {
            ptx::bulk_commit();
            ptx::bulk_wait<in_flight>();
            if (owed_[0].any()) {
                if constexpr (News::needs_release) this->release();
                tell(owed_[0]);
            }
#pragma unroll
            for (int step = 1; step < in_flight; ++step) owed_[step - 1] = owed_[step];
            owed_[in_flight - 1] = newest;
        }
        this->team_.sync();
    }

    // All stores have been written, all is told, all tiles may be written again.
    __device__ void flush() {
        if (this->team_.thread() == 0) ptx::bulk_commit();
        this->finish_stores();
        if (this->team_.thread() == 0) {
            if constexpr (News::needs_release) this->release();
#pragma unroll
            for (News& owed : owed_) {
                if (owed.any()) tell(owed);
                owed = News{};
            }
        }
        this->team_.sync();
    }

  private:
    __device__ void tell(const Signal& signal) const { this->give(signal); }
    __device__ void tell(const Post<W>& news) const { post(*news.progress, news.reached); }

    News owed_[in_flight];  // of the newest steps, oldest first
};

}  // namespace peerlane
