// Atomic accesses and fences: what each does, and what it makes known.
#pragma once

#include "machine.h"

namespace peerlane::emulator {

// ---- atomic accesses --------------------------------------------------------------------------------------------------------------------

inline Handover* Machine::handover(std::uint64_t offset) {
    const std::uint32_t index = handover_of_[offset / 4];
    return index < handovers_.size() && handovers_[index].offset == offset ? &handovers_[index] : nullptr;
}

inline Handover& Machine::make_handover(std::uint64_t offset, Actor writer) {
    if (Handover* known = handover(offset)) return *known;
    handover_of_[offset / 4] = static_cast<std::uint32_t>(handovers_.size());
    return handovers_.emplace_back(Handover{offset, writer, {}});
}

// What comes with every flag, for fences that have one order, and if launches that have ended count.
inline void Machine::hear(Fiber& fiber, const Handover& found) {
    if (found.writer != fiber.id) fiber.block->heard_from = found.writer;
    fiber.heard_fenced = join(fiber.heard_fenced, found.fenced);
    if (fiber.heard_boundary == found.boundary && fiber.heard_reads == found.reads) return;
    fiber.heard_boundary = found.boundary, fiber.heard_reads = found.reads;
    Ref<Vector>* const seen = fiber.view.seen;
    seen[View::boundary] = join(seen[View::boundary], found.boundary);
    seen[View::reads] = join(seen[View::reads], found.reads);
}

// Whether a thread knows that somebody has seen the value that is there.
inline bool Machine::seen(const Handover& handed, const Fiber& fiber) const {
    if (handed.reader == fiber.id && handed.read >= fiber.start) return true;
    return handed.reader != 0xffff && handed.read <= at(fiber.view.seen[View::ordinary], handed.reader);
}

// The thread's knowledge so far, itself included. What it does afterwards is not part of it.
inline Ref<Snapshot> Machine::snapshot(Fiber& fiber) {
    set(fiber.view.seen[View::ordinary], fiber.id, fiber.clock++);
    return Ref<Snapshot>(new Snapshot(fiber.view));
}

inline void Machine::take_over(Fiber& fiber, unsigned scope) {
    for (unsigned s = 0; s <= scope; ++s) {
        for (const Ref<Snapshot>& known : fiber.pending[s]) fiber.view.absorb(known->view);
        fiber.pending[s].clear();
    }
}

// What came with a value: known at once, or from the next fence on.
inline void Machine::learn(Fiber& fiber, Scope needed, const Ref<Snapshot>& known, unsigned order) {
    auto& pending = fiber.pending[needed];
    if (order & acquire) {
        fiber.view.absorb(known->view);
    } else if (pending.empty() || !(pending.back() == known)) {
        pending.push_back(known);
        if (pending.size() > 16) {
            const Ref<Snapshot> all(new Snapshot(known->view));
            for (const Ref<Snapshot>& one : pending) all->view.absorb(one->view);
            pending.assign(1, all);
        }
    }
}

// Whether the access is to no rank's memory: then it is done, but nothing is known about it.
inline bool Machine::outside(const void* address, std::uint32_t bytes, std::uint32_t site) {
    const std::uint64_t offset = this->offset(address);
    if (!memory.holds(offset)) return true;
    if (offset % bytes) {
        Finding finding{"misaligned_address", "", {side(*current, "accesses " + std::to_string(bytes) + " bytes")}};
        finding.sides[0].site = site;
        locate(finding, offset);
        fatal(std::move(finding));
    }
    return false;
}

inline void Machine::load(const void* address, void* value, std::uint32_t bytes, unsigned scope, unsigned order, std::uint32_t site) {
    maybe_pause();
    if (!outside(address, bytes, site)) {
        const std::uint64_t offset = this->offset(address);
        poll(offset, bytes, site);
        touch(offset, bytes, atomic | scope << scope_shift, site);
        if (Handover* found = handover(offset)) {
            Fiber& fiber = *current;
            hear(fiber, *found);
            found->reader = fiber.id, found->read = fiber.clock;
            const Scope needed = relation(found->writer, found->written, fiber.id);
            const Ref<Snapshot>& known = found->released[needed];
            if (known && needed <= scope) {
                learn(fiber, needed, known, order);
            }
        }
    }
    std::memcpy(value, address, bytes);
}

inline void Machine::store(void* address, const void* value, std::uint32_t bytes, unsigned scope, unsigned order, std::uint32_t site) {
    maybe_pause();
    if (!outside(address, bytes, site)) {
        const std::uint64_t offset = this->offset(address);
        const bool same = std::memcmp(address, value, bytes) == 0;
        touch(offset, bytes, writes | atomic | (same ? same_value : 0) | scope << scope_shift, site);
        Fiber& fiber = *current;
        const Ref<Snapshot> now = order & release ? snapshot(fiber) : Ref<Snapshot>();
        Handover& handed = make_handover(offset, fiber.id);
        handed.writer = fiber.id;
        handed.fenced = join(handed.fenced, fiber.view.seen[View::fenced]);
        handed.boundary = fiber.view.seen[View::boundary], handed.reads = fiber.view.seen[View::ordinary];
        handed.reader = 0xffff, handed.written = fiber.clock;
        for (unsigned s = 0; s < scopes; ++s) handed.released[s] = s > scope ? Ref<Snapshot>() : now ? now : fiber.released[s];
        if (!same) ++version_;
        budget_ = std::min(budget_, 1 + random_.below(4));
    }
    std::memcpy(address, value, bytes);
}

inline void Machine::update(
    void* address, std::uint32_t bytes, unsigned scope, unsigned order, Change change, void* context, std::uint32_t site) {
    maybe_pause();
    const std::uint64_t offset = this->offset(address);
    Fiber* const fiber = std::exchange(current, nullptr);  // the change itself is no access
    if (memory.holds(offset)) {
        current = fiber;
        outside(address, bytes, site);
        poll(offset, bytes, site);
        current = nullptr;
        char before[16];
        std::memcpy(before, address, bytes);
        const bool stored = change(address, context);
        const bool changed = std::memcmp(before, address, bytes) != 0;
        current = fiber;
        touch(offset, bytes, (stored ? writes | updates : 0) | atomic | scope << scope_shift, site);
        Handover& handed = make_handover(offset, fiber->id);
        hear(*fiber, handed);
        ordered_ |= handed.written && (handed.writer != fiber->id || handed.written < fiber->start);  // of another thread
        const Scope from = relation(handed.writer, handed.written, fiber->id);
        if (handed.released[from] && from <= scope) {
            learn(*fiber, from, handed.released[from], order);
        }
        if (stored) {
            // An update hands on what the value before it did, too.
            const Ref<Snapshot> now = order & release ? snapshot(*fiber) : Ref<Snapshot>();
            Ref<Snapshot> handed_on[scopes];
            for (unsigned s = 0; s < scopes; ++s) {
                const Ref<Snapshot>& old = handed.released[std::max<unsigned>(s, from)];
                const Ref<Snapshot> own = s > scope ? Ref<Snapshot>() : now ? now : fiber->released[s];
                handed_on[s] = own ? own : old;
                if (own && old && !(own == old)) {
                    handed_on[s] = Ref<Snapshot>(new Snapshot(own->view));
                    handed_on[s]->view.absorb(old->view);
                }
            }
            handed.writer = fiber->id;
            for (unsigned s = 0; s < scopes; ++s) handed.released[s] = handed_on[s];
            handed.fenced = join(handed.fenced, fiber->view.seen[View::fenced]);
            handed.boundary = fiber->view.seen[View::boundary];  // with what it has heard right now
            handed.reads = join(fiber->view.seen[View::ordinary], handed.reads);
            handed.written = fiber->clock;
        }
        handed.reader = fiber->id, handed.read = fiber->clock;
        if (changed) ++version_;
        budget_ = std::min(budget_, 1 + random_.below(4));
    } else {
        change(address, context);
        current = fiber;
    }
}

// Between the halves others may run, and see one.
inline void Machine::store_halves(void* address, const void* value, unsigned scope, unsigned order, std::uint32_t site) {
    Fiber& fiber = *current;
    outside(address, 16, site);
    fiber.halfway = this->offset(address);
    const unsigned first = random_.below(2) * 8;
    store(static_cast<char*>(address) + first, static_cast<const char*>(value) + first, 8, scope, order, site);
    halfway_.push_back(&fiber);
    store(static_cast<char*>(address) + (8 - first), static_cast<const char*>(value) + (8 - first), 8, scope, order, site);
    std::erase(halfway_, &fiber);
}

inline void Machine::load_halves(const void* address, void* value, unsigned scope, unsigned order, std::uint32_t site) {
    outside(address, 16, site);
    load(address, value, 8, scope, order, site);
    load(static_cast<const char*>(address) + 8, static_cast<char*>(value) + 8, 8, scope, order, site);
    Fiber& fiber = *current;
    fiber.torn = {};
    for (const Fiber* other : halfway_) {
        if (other->halfway == this->offset(address)) fiber.torn = {site, other->site};
    }
}

inline void Machine::wait_for_launch() { current->view.absorb(current->block->stream->before); }

// The memory on each rank for which a multicast address of the caller's stands. It has no other use.
inline std::uint32_t Machine::multicast(const void* address, std::uint32_t bytes, void** parts, std::uint32_t site) {
    const std::uint64_t offset = memory.offset(address);
    const Buffer& buffer = memory.buffers()[memory.holds(offset) ? memory.number_at(offset) : 0];
    const bool own = !buffer.multicast.empty() && buffer.rank == static_cast<int>(current->block->launch->rank);
    if (!own || offset + bytes > buffer.end || offset % bytes) {
        const char* why = !own ? "multimem at an address that is not a multicast address of this rank; a handle's multicast_ptr is 0 unless "
                                "TORCH_SYMM_MEM_DISABLE_MULTICAST=0 allows multicast" :
            offset % bytes ? "multimem at an address that is not aligned to its size" : "multimem behind the end of a multicast address";
        Finding finding{"illegal_address", why, {side(*current, "multimem of " + std::to_string(bytes) + " bytes")}};
        finding.sides[0].site = site;
        locate(finding, offset);
        fatal(std::move(finding));
    }
    std::uint32_t count = 0;
    for (const std::uint64_t part : buffer.multicast) parts[count++] = memory.address(part + offset - buffer.begin);
    return count;
}

// ---- fences and time --------------------------------------------------------------------------------------------------------------------

inline void Machine::fence(unsigned scope, unsigned order) {
    maybe_pause();
    Fiber& fiber = *current;
    if (order & acquire) take_over(fiber, scope);
    if (!(order & release)) return;
    if (order == sequential && scope == system_scope) {
        Ref<Vector>* const seen = fiber.view.seen;
        seen[View::ordinary] = join(seen[View::ordinary], fiber.heard_fenced);
        set(seen[View::ordinary], fiber.id, fiber.clock);
        seen[View::fenced] = join(seen[View::fenced], seen[View::ordinary]);
    }
    const Ref<Snapshot> now = snapshot(fiber);
    for (unsigned s = 0; s <= scope; ++s) fiber.released[s] = now;
}

inline void Machine::proxy_fence(unsigned proxy) {
    maybe_pause();
    Fiber& fiber = *current;
    View& view = fiber.view;
    set(view.seen[View::ordinary], fiber.id, fiber.clock++);
    view.seen[View::async_shared] = join(view.seen[View::async_shared], view.seen[View::ordinary]);
    if (proxy == all_proxies) view.seen[View::async_global] = join(view.seen[View::async_global], view.seen[View::ordinary]);
}

inline std::uint64_t Machine::time(std::uint32_t site) {
    poll(~0ull, 0, site);
    if (idle_) {
        time_ += 1'000'000'000'000;  // who waits while he keeps others awake would do so for ever
    } else if (patience_) {
        time_ += time_step_;
        if (!desperate_) time_step_ = std::min<std::uint64_t>(2 * time_step_, 1'000'000);
    }
    return ++time_;
}

inline void Machine::pause() {
    if (!patience_) leave(State::runnable);
}

inline void Machine::trap(std::uint32_t site) {
    const bool late = desperate_ || idle_;
    Finding finding{late ? "deadlock" : "trap", late ? unstarted() : "", {}};
    finding.fault = fault(current->block->launch->rank);
    finding.sides = {side(*current, finding.fault.empty() ? "traps" : "gives up waiting")};
    finding.sides[0].site = site;
    fatal(std::move(finding));
}

}  // namespace peerlane::emulator
