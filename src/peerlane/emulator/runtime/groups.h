// Where threads of a block meet: barriers and warp-wide operations, and the ends of threads and blocks.
#pragma once

#include "machine.h"

namespace peerlane::emulator {

inline void Machine::contribute(Meeting& meeting, Fiber& fiber) {
    for (int kind = 0; kind < View::kinds; ++kind) {
        if (meeting.last.seen[kind] == fiber.view.seen[kind]) continue;
        meeting.sum.seen[kind] = join(meeting.sum.seen[kind], fiber.view.seen[kind]);
        meeting.last.seen[kind] = fiber.view.seen[kind];
    }
    set(meeting.sum.seen[View::ordinary], fiber.id, fiber.clock++);
    ++meeting.arrived;
}

// Everybody who waits goes on, with what all knew.
inline void Machine::conclude(Meeting& meeting) {
    for (Fiber* fiber : meeting.waiting) {
        fiber->view = meeting.sum;
        enlist(*fiber, State::runnable);
    }
    meeting.waiting.clear();
    meeting.sum = meeting.last = View{};
    meeting.arrived = 0;
    ++version_;
}

// ---- whether those who meet are meant to ------------------------------------------------------------------------------------------------

inline Finding Machine::mismatch(std::string detail, const Fiber& other, std::uint32_t other_site, std::uint32_t site) const {
    Finding finding{"barrier", std::move(detail), {side(other, "waits"), side(*current, "comes")}};
    finding.sides[0].site = other_site;
    finding.sides[1].site = site;
    return finding;
}

// What compute-sanitizer's synccheck says of barriers of a block.
inline void Machine::check_barrier(const Meeting& meeting, std::uint32_t number, std::uint32_t threads, std::uint32_t place, std::uint32_t site) {
    if (number >= 16 || threads % 32) {
        const std::string what = number >= 16 ? "number " + std::to_string(number) + ": a block has barriers 0 to 15"
                                              : std::to_string(threads) + " threads: expected a multiple of 32";
        Finding finding{"misuse", "a barrier of " + what, {side(*current, "comes to it")}};
        finding.sides[0].site = site;
        fatal(std::move(finding));
    }
    if (!meeting.arrived || !meeting.first) return;
    const std::uint32_t all = (current->block->threads + 31) / 32 * 32, before = meeting.expected ? meeting.expected : all;
    if (before != (threads ? threads : all)) {
        const std::string number_text = std::to_string(number) + " is waited at for ";
        fatal(mismatch("barrier " + number_text + std::to_string(before) + " threads and for " + std::to_string(threads ? threads : all),
                       *meeting.first, meeting.site, site));
    }
    if (!threads && !meeting.expected && meeting.site != site) {
        Finding finding = mismatch("some threads of the block meet in one __syncthreads(), others in another", *meeting.first, meeting.site, site);
        finding.offset = meeting.place != place;  // else the compiler may have put one of the source there twice
        report(std::move(finding));
    }
}

// The same of a warp's operations. Two lanes that wait for each other in different ones never meet.
inline void Machine::check_warp(const Warp& warp, const Warp::Exchange& own, const char* name, std::uint32_t site) {
    const std::uint32_t lane = current->index % 32;
    if (!(own.mask >> lane & 1)) {
        Finding finding{"misuse", "the mask of a warp-wide operation does not name its caller", {side(*current, "calls it")}};
        finding.sides[0].site = site;
        fatal(std::move(finding));
    }
    for (const auto* exchanges : {&warp.barriers, &warp.exchanges}) {
        for (const auto& known : *exchanges) {
            if (known.get() == &own || !(known->mask >> lane & 1)) continue;
            for (const Fiber* other : known->meeting.waiting) {
                if (!(own.mask >> other->index % 32 & 1)) continue;
                Finding finding = mismatch("lanes of a warp wait for each other in different operations, or with different masks", *other,
                                           other->site, site);
                finding.offset = 1;  // two operations or two masks, also if one line of the source has both
                finding.sides[0].action = other->waits_for;
                finding.sides[1].action = name;
                fatal(std::move(finding));
            }
        }
    }
}

inline void Machine::barrier(std::uint32_t number, std::uint32_t threads, bool wait_for_it, std::uint32_t place, std::uint32_t site) {
    Fiber& fiber = *current;
    Meeting& meeting = fiber.block->barriers[number % 16];
    check_barrier(meeting, number, threads, place, site);
    if (!meeting.arrived) meeting.first = &fiber, meeting.site = site, meeting.place = place;
    meeting.expected = threads;
    contribute(meeting, fiber);
    if (wait_for_it) meeting.waiting.push_back(&fiber);
    if (meeting.arrived == (threads ? threads : fiber.block->live)) {
        conclude(meeting);
        if (wait_for_it) leave(State::runnable);
    } else if (wait_for_it) {
        wait("waits at a barrier", site);
    }
}

inline Warp::Exchange& Machine::exchange(std::vector<std::unique_ptr<Warp::Exchange>>& exchanges, std::uint32_t mask) {
    for (const auto& known : exchanges) {
        if (known->mask == mask) return *known;
    }
    exchanges.push_back(std::make_unique<Warp::Exchange>());
    exchanges.back()->mask = mask;
    return *exchanges.back();
}

// Waits until every live thread of the mask is here.
inline void Machine::meet(Warp::Exchange& exchange, bool orders, const char* name, std::uint32_t site) {
    Fiber& fiber = *current;
    Warp& warp = fiber.block->warps[fiber.index / 32];
    Meeting& meeting = exchange.meeting;
    check_warp(warp, exchange, name, site);
    if (orders) contribute(meeting, fiber);
    exchange.arrived |= 1u << fiber.index % 32;
    meeting.waiting.push_back(&fiber);
    if ((exchange.arrived & warp.live) != (exchange.mask & warp.live)) {
        wait(name, site);
        return;
    }
    warp_concludes(exchange, orders);
    leave(State::runnable);
}

inline void Machine::warp_concludes(Warp::Exchange& exchange, bool orders) {
    exchange.values[exchange.turn][32] = exchange.arrived;
    exchange.arrived = 0;
    exchange.turn ^= 1;
    std::erase(asking_, &exchange);
    if (orders) {
        conclude(exchange.meeting);
    } else {
        for (Fiber* fiber : exchange.meeting.waiting) enlist(*fiber, State::runnable);
        exchange.meeting.waiting.clear();
        ++version_;
    }
}

inline void Machine::warp_barrier(std::uint32_t mask, std::uint32_t site) {
    meet(exchange(current->block->warps[current->index / 32].barriers, mask), true, "waits at __syncwarp", site);
}

inline const unsigned long long* Machine::warp_exchange(std::uint32_t mask, unsigned long long value, std::uint32_t site) {
    Warp::Exchange& meeting = exchange(current->block->warps[current->index / 32].exchanges, mask);
    unsigned long long* values = meeting.values[meeting.turn];
    values[current->index % 32] = value;
    meet(meeting, false, "waits in a warp-wide operation", site);
    return values;
}

// A GPU runs lanes together that come to one place: all that are not held up elsewhere, which shows when nobody else can go on.
inline std::uint32_t Machine::active_mask(std::uint32_t site) {
    Warp& warp = current->block->warps[current->index / 32];
    Warp::Exchange& asking = exchange(warp.asking, site);
    const int turn = asking.turn;
    asking.arrived |= 1u << current->index % 32;
    asking.meeting.waiting.push_back(current);
    if (asking.arrived == warp.live) {
        warp_concludes(asking, false);
        leave(State::runnable);
    } else {
        if (asking.meeting.waiting.size() == 1) asking_.push_back(&asking);
        wait("asks which lanes are active", site);
    }
    return static_cast<std::uint32_t>(asking.values[turn][32]);
}

// ---- clusters

inline std::uint32_t Machine::cluster_rank() const { return static_cast<std::uint32_t>(current->block->key - current->block->cluster->key); }

inline std::uint32_t Machine::live_in_cluster(const Block& block) {
    std::uint32_t live = 0;
    for (const Block* mate = block.cluster; mate; mate = mate->next) live += mate->live;
    return live;
}

inline void Machine::cluster_concludes(Block& first) {
    Meeting& meeting = first.cluster_barrier;
    for (Fiber* fiber : meeting.waiting) {
        fiber->view.absorb(meeting.sum);
        enlist(*fiber, State::runnable);
    }
    first.cluster_ended = meeting.sum;
    ++first.cluster_phase;
    meeting = Meeting{};
    ++version_;
}

// Orders all that came before, or only what came before an mbarrier_init_fence.
inline void Machine::cluster_arrive(bool orders) {
    Fiber& fiber = *current;
    Block& first = *fiber.block->cluster;
    fiber.cluster_phase = first.cluster_phase;
    if (orders) {
        contribute(first.cluster_barrier, fiber);
    } else {
        if (fiber.initialised) first.cluster_barrier.sum.absorb(fiber.initialised->view);
        ++first.cluster_barrier.arrived;
    }
    if (first.cluster_barrier.arrived == live_in_cluster(*fiber.block)) cluster_concludes(first);
}

inline void Machine::cluster_wait(std::uint32_t site) {
    Fiber& fiber = *current;
    Block& first = *fiber.block->cluster;
    if (first.cluster_phase != fiber.cluster_phase) {
        fiber.view.absorb(first.cluster_ended);
        leave(State::runnable);
    } else {
        first.cluster_barrier.waiting.push_back(&fiber);
        wait("waits at a barrier of its cluster", site);
    }
}

inline void* Machine::cluster_pointer(const void* pointer, std::uint32_t rank, std::uint32_t site) {
    const Block* mate = current->block->cluster;
    for (std::uint32_t i = 0; i < rank && mate; ++i) mate = mate->next;
    if (!mate) {
        current->site = site;
        fatal({"misuse", "a block of this number is not in the cluster", {side(*current, "asks for its shared memory")}});
    }
    return memory.address(memory.offset(pointer) - current->block->dynamic_shared + mate->dynamic_shared);
}

// A thread that has ended is waited for no more. Not on its own stack, which the next launch may need.
inline void Machine::thread_ends(Fiber& fiber) {
    Block& block = *fiber.block;
    Warp& warp = block.warps[fiber.index / 32];
    warp.live &= ~(1u << fiber.index % 32);
    --block.live;
    contribute(block.end, fiber);
    View& end = block.end.sum;  // what it has seen, but not acquired, counts from here on if the end of a launch counts
    for (const auto& pending : fiber.pending) {
        for (const Ref<Snapshot>& known : pending) end.seen[View::boundary] = join(end.seen[View::boundary], known->view.seen[View::ordinary]);
    }
    for (Meeting& barrier : block.barriers) {
        if (barrier.arrived && !barrier.expected && barrier.arrived == block.live) conclude(barrier);
    }
    for (const auto& known : warp.barriers) {
        if (known->arrived && (known->arrived & warp.live) == (known->mask & warp.live)) warp_concludes(*known, true);
    }
    for (const auto& known : warp.exchanges) {
        if (known->arrived && (known->arrived & warp.live) == (known->mask & warp.live)) warp_concludes(*known, false);
    }
    for (const auto& known : warp.asking) {
        if (known->arrived && known->arrived == warp.live) warp_concludes(*known, false);
    }
    const Meeting& meeting = block.cluster->cluster_barrier;
    if (meeting.arrived && meeting.arrived == live_in_cluster(block)) cluster_concludes(*block.cluster);
    ++version_;
    if (block.live == 0) block_ends(block);
}

// Shared memory is given away with the block: no copy, of other blocks of the cluster neither, may still use it, as far as the block's threads
// know.
inline void Machine::block_ends(Block& block) {
    for (const Block* mate = block.cluster; mate; mate = mate->next) {
        for (Fiber* fiber = mate->first; fiber != mate->first + mate->threads; ++fiber) {
            for (const Slot& slot : fiber->slots) {
                if (slot.block != &block || at(block.end.sum.seen[View::ordinary], slot.actor) >= slot.must_know) continue;
                Finding finding{"unfinished_copy", "", {side(*fiber, "starts a copy that nobody waits for before the block ends")}};
                finding.sides[0].site = slot.site;
                report(std::move(finding));
            }
        }
    }
    for (const auto& [actor, last] : block.arrivals) {
        if (at(block.end.sum.seen[View::ordinary], actor) >= last.first) continue;
        Side arrives = side(*actors_[actor].fiber, "uses shared memory of another block, which may have ended for all that it knows");
        arrives.site = last.second;
        report({"misuse", "", {std::move(arrives)}});
        break;
    }
    Stream& stream = *block.stream;
    stream.end.absorb(block.end.sum);
    --stream.live_blocks;
    --resident_[stream.rank];
    if (stream.scarce && live_in_cluster(block) == 0) stream.free.push_back(static_cast<std::uint32_t>(block.cluster->key - stream.first_block));
    start_blocks();
    stream_goes_on(stream);
}

}  // namespace peerlane::emulator
