// Accesses and fences: what each does, what it makes known, and whether an earlier one is at odds with it.
#pragma once

#include "machine.h"

namespace peerlane::emulator {

inline const char* scope_name(unsigned scope) { return scope == block_scope ? "block" : scope == gpu_scope ? "gpu" : "system"; }

// ---- who is who, and what is told about it --------------------------------------------------------------------------------------------------

inline Scope Machine::relation(Actor a, Actor b) const {
    if (actors_[a].block == actors_[b].block) return block_scope;
    return actors_[a].rank == actors_[b].rank ? gpu_scope : system_scope;
}

inline Uint3 unfold(std::uint32_t index, const Uint3& size) { return {index % size.x, index / size.x % size.y, index / size.x / size.y}; }

inline Side Machine::side(Actor actor, Clock clock, std::uint8_t flags, std::uint32_t bytes, std::uint32_t site) const {
    const Identity& identity = actors_[actor];
    const Fiber& fiber = *identity.fiber;
    std::string action = flags & updates ? "updates" : flags & writes ? "writes" : "reads";
    action += " " + std::to_string(bytes) + " bytes";
    if (flags & atomic) action += std::string(", atomic in ") + scope_name(flags >> scope_shift & 3) + " scope";
    if (flags & asynchronous) action += ", asynchronously";
    Side result = side(fiber, action);
    result.site = site;
    if (!identity.asynchronous) {
        // The access may be of an earlier launch than the one that the thread is in now.
        const auto later = std::upper_bound(fiber.launches.begin(), fiber.launches.end(), clock);
        result.launch = std::max<int>(0, static_cast<int>(later - fiber.launches.begin()) - 1);
    }
    return result;
}

inline Side Machine::side(const Fiber& fiber, std::string action) const {
    const Launch& launch = *fiber.block->launch;
    return {static_cast<int>(launch.rank), static_cast<int>(launch.number), fiber.block->index, fiber.thread, std::move(action), fiber.site};
}

inline void Machine::report(Finding finding) { findings.add(schedule_, std::move(finding)); }

inline void Machine::fatal(Finding finding) {
    report(std::move(finding));
    aborted_ = true;
    peerlane_switch(&current->stack_pointer, scheduler_);
    __builtin_unreachable();
}

inline void Machine::crash(const char* what, std::uint32_t site) {
    Finding finding{"crash", what, {side(*current, "ends the program")}};
    finding.sides[0].site = site;
    fatal(std::move(finding));
}

// ---- races ------------------------------------------------------------------------------------------------------------------------------------

// What two unordered accesses to the same bytes are: nothing to speak of, or a finding of this kind.
inline Machine::Odds Machine::odds(const Record& record, std::uint16_t part, const Access& access) const {
    const std::uint8_t flags = record.flags();
    if (!((flags | access.flags) & writes)) return Odds::none;
    if (!(flags & access.flags & atomic)) return Odds::race;
    const unsigned needed = relation(record.actor, access.actor);
    if ((flags >> scope_shift & 3u) < needed || (access.flags >> scope_shift & 3u) < needed) return Odds::narrow_scope;
    if (record.bytes != part) return Odds::torn;
    // Stores that nothing orders, or a store among read-modify-writes: one of them is lost.
    const bool both_write = flags & access.flags & writes;
    const bool both_update = flags & access.flags & updates;
    return both_write && !both_update && !((flags | access.flags) & same_value) ? Odds::lost_update : Odds::none;
}

inline void Machine::report_pair(
    Odds odds, const Record& record, const Access& access, std::uint64_t offset, std::uint32_t bytes) {
    Finding finding{odds == Odds::lost_update ? "lost_update" : odds == Odds::proxy_fence ? "proxy_fence" : "race", "", {}};
    if (odds == Odds::narrow_scope) {
        finding.detail = std::string("both are atomic, but these threads need ") + scope_name(relation(record.actor, access.actor)) + " scope";
    } else if (odds == Odds::torn) {
        finding.detail = "both are atomic, but of different sizes, so that one may see half of the other";
    }
    const auto earlier_bytes = static_cast<std::uint32_t>(__builtin_popcount(record.bytes));
    finding.sides = {
        side(record.actor, record.clock, record.flags(), earlier_bytes, record.site),
        side(access.actor, access.clock, access.flags, bytes, access.site)};
    locate(finding, offset, bytes);
    report(std::move(finding));
}

inline void Machine::locate(Finding& finding, std::uint64_t offset, std::uint32_t bytes) const {
    finding.buffer = static_cast<int>(memory.holds(offset) ? memory.number_at(offset) : 0);
    finding.offset = offset - memory.buffers()[finding.buffer].begin;
    finding.bytes = bytes;
}

inline bool Machine::happened(const Record& record, std::uint16_t part, const Access& access, std::uint64_t offset, std::uint32_t bytes) {
    if (record.actor == access.actor || record.clock <= at(current->view.seen[View::ordinary], record.actor)) return true;
    const Odds kind = odds(record, part, access);
    if (kind == Odds::none) return false;
    report_pair(kind, record, access, offset, bytes);
    return true;  // said once; later accesses are compared with this one
}

inline bool Machine::allowed(const Fiber& fiber, std::uint64_t offset, std::uint32_t bytes) const {
    const Buffer& buffer = memory.buffers()[memory.number_at(offset)];
    return offset >= buffer.begin && offset + bytes <= buffer.end &&
           (buffer.rank < 0 || buffer.rank == static_cast<int>(fiber.block->launch->rank)) &&
           (buffer.block < 0 || buffer.block == fiber.block->key);
}

inline void Machine::touch(std::uint64_t offset, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site) {
    Fiber& fiber = *current;
    fiber.site = site;
    const Access access{fiber.id, flags, fiber.clock, site};
    if (!allowed(fiber, offset, bytes)) {
        Finding finding{"illegal_address", "", {side(fiber.id, fiber.clock, flags, bytes, site)}};
        locate(finding, offset, bytes);
        fatal(std::move(finding));
    }
    if (flags & writes) {
        memory.written(offset, bytes);
        wrote_ = true;
        fiber.polls = 0;
    } else if (flags & atomic) {
        // One that polls is noted once, until it or the memory goes on.
        const Poll poll{offset, version_, fiber.clock};
        if (fiber.noted == poll) return;
        fiber.noted = poll;
    }
    shadow_.access(offset, bytes, access, [&](const Record& record, std::uint16_t part) { return happened(record, part, access, offset, bytes); });
}

inline void Machine::plain(const void* address, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site) {
    const std::uint64_t offset = memory.offset(address);
    if (!memory.holds(offset)) return;
    if (--budget_ == 0) {
        budget_ = 1 + random_.below(2 * style_.accesses);
        if (!patience_) leave(State::runnable);
    }
    touch(offset, bytes, flags, site);
}

// ---- atomic accesses -----------------------------------------------------------------------------------------------------------------------------

inline Handover* Machine::handover(std::uint64_t offset) {
    const std::uint32_t index = handover_of_[offset / 4];
    return index < handovers_.size() && handovers_[index].offset == offset ? &handovers_[index] : nullptr;
}

inline Handover& Machine::make_handover(std::uint64_t offset) {
    if (Handover* known = handover(offset)) return *known;
    handover_of_[offset / 4] = static_cast<std::uint32_t>(handovers_.size());
    return handovers_.emplace_back(Handover{offset, current->id, {}});
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
    const std::uint64_t offset = memory.offset(address);
    if (memory.holds(offset) && offset % bytes) {
        Finding finding{"illegal_address", "an atomic access that is not aligned to its size", {side(*current, "")}};
        finding.sides[0].site = site;
        fatal(std::move(finding));
    }
    return !memory.holds(offset);
}

inline void Machine::load(const void* address, void* value, std::uint32_t bytes, unsigned scope, unsigned order, std::uint32_t site) {
    maybe_pause();
    if (!outside(address, bytes, site)) {
        const std::uint64_t offset = memory.offset(address);
        poll(offset, bytes, site);
        touch(offset, bytes, atomic | scope << scope_shift, site);
        if (const Handover* found = handover(offset)) {
            Fiber& fiber = *current;
            const Scope needed = relation(found->writer, fiber.id);
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
        const std::uint64_t offset = memory.offset(address);
        const bool same = std::memcmp(address, value, bytes) == 0;
        touch(offset, bytes, writes | atomic | (same ? same_value : 0) | scope << scope_shift, site);
        Fiber& fiber = *current;
        const Ref<Snapshot> now = order & release ? snapshot(fiber) : Ref<Snapshot>();
        Handover& handed = make_handover(offset);
        handed.writer = fiber.id;
        for (unsigned s = 0; s < scopes; ++s) handed.released[s] = s > scope ? Ref<Snapshot>() : now ? now : fiber.released[s];
        if (!same) ++version_;
        budget_ = std::min(budget_, 1 + random_.below(4));
    }
    std::memcpy(address, value, bytes);
}

inline void Machine::update(
    void* address, std::uint32_t bytes, unsigned scope, unsigned order, Change change, void* context, std::uint32_t site) {
    maybe_pause();
    Fiber* const fiber = std::exchange(current, nullptr);  // the change itself is no access
    if (memory.holds(memory.offset(address))) {
        current = fiber;
        outside(address, bytes, site);
        const std::uint64_t offset = memory.offset(address);
        poll(offset, bytes, site);
        current = nullptr;
        char before[16];
        std::memcpy(before, address, bytes);
        const bool stored = change(address, context);
        const bool changed = std::memcmp(before, address, bytes) != 0;
        current = fiber;
        touch(offset, bytes, (stored ? writes | updates : 0) | atomic | scope << scope_shift, site);
        Handover& handed = make_handover(offset);
        const Scope from = relation(handed.writer, fiber->id);
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
        }
        if (changed) ++version_;
        budget_ = std::min(budget_, 1 + random_.below(4));
    } else {
        change(address, context);
        current = fiber;
    }
}

// ---- fences and time -------------------------------------------------------------------------------------------------------------------------------

inline void Machine::fence(unsigned scope) {
    maybe_pause();
    Fiber& fiber = *current;
    take_over(fiber, scope);
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
    if (patience_) {
        time_ += time_step_;
        if (!desperate_) time_step_ = std::min<std::uint64_t>(2 * time_step_, 1'000'000);
    }
    return ++time_;
}

inline void Machine::pause() {
    if (!patience_) leave(State::runnable);
}

inline void Machine::trap(std::uint32_t site) {
    Finding finding{desperate_ ? "deadlock" : "trap", desperate_ ? unstarted() : "", {}};
    finding.fault = fault(current->block->launch->rank);
    finding.sides = {side(*current, finding.fault.empty() ? "traps" : "gives up waiting")};
    finding.sides[0].site = site;
    fatal(std::move(finding));
}

}  // namespace peerlane::emulator
