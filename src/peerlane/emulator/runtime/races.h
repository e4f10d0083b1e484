// Every access to the ranks' memory: whether it may be made, and whether an earlier one is at odds with it.
#pragma once

#include "machine.h"

namespace peerlane::emulator {

inline const char* scope_name(unsigned scope) { return scope == block_scope ? "block" : scope == gpu_scope ? "gpu" : "system"; }

// ---- who is who, and what is told about it ----------------------------------------------------------------------------------------------

// How far apart are `a`, as it was then, and `b`, as it is now. Blocks of one place in turn are different blocks.
inline Scope Machine::relation(Actor a, Clock when, Actor b) const {
    const Identity& then = actors_[a];
    if (then.block == actors_[b].block && (then.asynchronous || when >= then.fiber->start)) return block_scope;
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
        const auto begun = [](Clock then, const Fiber::Begin& begin) { return then < begin.clock; };
        const auto later = std::upper_bound(fiber.begins.begin(), fiber.begins.end(), clock, begun);
        const Block& block = *(later == fiber.begins.begin() ? later : later - 1)->block;
        result.launch = static_cast<int>(block.launch->number);
        result.block = block.index;
    }
    return result;
}

inline Side Machine::side(const Fiber& fiber, std::string action) const {
    const Launch& launch = *fiber.block->launch;
    const int rank = static_cast<int>(launch.rank), number = static_cast<int>(launch.number);
    return {rank, number, fiber.block->index, fiber.thread, std::move(action), fiber.site};
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

// ---- races ------------------------------------------------------------------------------------------------------------------------------

// What two unordered accesses to the same bytes are: nothing to speak of, or a finding of this kind.
inline Machine::Odds Machine::odds(const Record& record, std::uint16_t part, const Access& access) const {
    const std::uint8_t flags = record.flags();
    if (!((flags | access.flags) & writes)) return Odds::none;
    if (!(flags & access.flags & atomic)) {
        // Lanes that hold the same element store it several times, by one instruction.
        const bool alike = record.site == access.site && relation(record.actor, record.clock, access.actor) == block_scope;
        const bool same = access.flags & same_value && flags & writes && !((flags | access.flags) & (atomic | asynchronous));
        return same && alike ? Odds::same_value : Odds::race;
    }
    const unsigned needed = relation(record.actor, record.clock, access.actor);
    if ((flags >> scope_shift & 3u) < needed || (access.flags >> scope_shift & 3u) < needed) return Odds::narrow_scope;
    if (record.bytes != part) return Odds::torn;
    // Stores that nothing orders, or a store among read-modify-writes: one of them is lost.
    const bool both_write = flags & access.flags & writes;
    const bool both_update = flags & access.flags & updates;
    return both_write && !both_update && !((flags | access.flags) & same_value) ? Odds::lost_update : Odds::none;
}

inline void Machine::report_pair(
    Odds odds, const Record& record, const Access& access, std::uint64_t offset, std::uint32_t bytes) {
    static const std::map<Odds, const char*> kinds{
        {Odds::lost_update, "lost_update"}, {Odds::proxy_fence, "proxy_fence"}, {Odds::boundary, "launch_boundary"},
        {Odds::same_value, "same_value"}, {Odds::read_only, "race:read_only"}};
    const auto kind = kinds.find(odds);
    Finding finding{kind == kinds.end() ? "race" : kind->second, "", {}};
    if (odds == Odds::narrow_scope) {
        const char* needed = scope_name(relation(record.actor, record.clock, access.actor));
        finding.detail = std::string("both are atomic, but these threads need ") + needed + " scope";
    } else if (odds == Odds::torn) {
        finding.detail = "both are atomic, but of different sizes, so that one may see half of the other";
    } else if (odds == Odds::race) {
        finding.detail = unheard_fence(record);
    }
    const auto earlier_bytes = static_cast<std::uint32_t>(__builtin_popcount(record.bytes));
    finding.sides = {
        side(record.actor, record.clock, record.flags(), earlier_bytes, record.site),
        side(access.actor, access.clock, access.flags, bytes, access.site)};
    finding.bytes = bytes;
    locate(finding, offset);
    report(std::move(finding));
}

inline void Machine::locate(Finding& finding, std::uint64_t offset) const {
    finding.buffer = static_cast<int>(memory.holds(offset) ? memory.number_at(offset) : 0);
    finding.offset = offset - memory.buffers()[finding.buffer].begin;
}

inline bool Machine::happened(const Record& record, std::uint16_t part, const Access& access, std::uint64_t offset, std::uint32_t bytes) {
    const View& view = current->view;
    if (record.clock <= at(view.seen[View::ordinary], record.actor)) return true;
    if (record.actor == access.actor && record.clock >= current->start) return true;
    Odds kind = odds(record, part, access);
    if (kind == Odds::none) return false;
    if (kind == Odds::lost_update) {
        // Who has seen a value does not lose it.
        const Handover* handed = handover(offset);
        if (handed && handed->writer == record.actor && seen(*handed, *current)) return true;
    }
    const bool over = record.clock <= at(view.seen[View::boundary], record.actor) ||
                      (!(record.flags() & writes) && record.clock <= at(current->block->start.seen[View::reads], record.actor));
    if (over) kind = Odds::boundary;
    report_pair(kind, record, access, offset, bytes);
    return true;  // said once; later accesses are compared with this one
}

inline bool Machine::allowed(const Fiber& fiber, std::uint64_t offset, std::uint32_t bytes) const {
    const Buffer& buffer = memory.buffers()[memory.number_at(offset)];
    return offset >= buffer.begin && offset + bytes <= buffer.end &&
           buffer.multicast.empty() && (buffer.rank < 0 || buffer.rank == static_cast<int>(fiber.block->launch->rank)) &&
           (buffer.block < 0 || (buffer.block >= fiber.block->cluster->key &&
                                 buffer.block < fiber.block->cluster->key + static_cast<int>(fiber.block->launch->cluster)));
}

inline void Machine::touch(std::uint64_t offset, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site) {
    Fiber& fiber = *current;
    fiber.site = site;
    const Access access{fiber.id, flags, fiber.clock, site};
    if (!allowed(fiber, offset, bytes)) {
        Finding finding{"illegal_address", "", {side(fiber.id, fiber.clock, flags, bytes, site)}};
        locate(finding, offset);
        fatal(std::move(finding));
    }
    if (fiber.block->launch->cluster > 1) {
        const int key = memory.buffers()[memory.number_at(offset)].block;
        if (key >= 0 && key != fiber.block->key) owner(offset, site).arrivals[fiber.id] = {fiber.clock, site};
    }
    if (flags & writes) {
        memory.written(offset, bytes);
        wrote_ = true;
        last_write_ = schedule_switches_;
        fiber.polls = 0;
    } else if (flags & atomic) {
        // One that polls is noted once, until it or the memory goes on.
        const Poll poll{offset, version_, fiber.clock};
        if (fiber.noted == poll) return;
        fiber.noted = poll;
    }
    const bool known = shadow_.access(offset, bytes, access, [&](const Record& record, std::uint16_t part) {
        return happened(record, part, access, offset, bytes);
    });
    if (!known && !fiber.host) {
        Finding finding{"uninitialised_read", "", {side(fiber.id, fiber.clock, flags, bytes, site)}};
        finding.bytes = bytes;
        locate(finding, offset);
        report(std::move(finding));
    }
}

// The bytes of one load, of which it is promised that nobody writes them during the launch: what is written may not be seen, in whatever order.
inline void Machine::read_only(const void* address, std::uint32_t bytes, std::uint32_t site) {
    const std::uint64_t offset = this->offset(address);
    if (!memory.holds(offset) || !allowed(*current, offset, bytes)) return;
    const Access access{current->id, 0, current->clock, site};
    shadow_.writes_to(offset, bytes, [&](const Record& record) {
        if (record.clock <= at(current->block->start.seen[View::ordinary], record.actor)) return;
        if (record.clock <= at(current->view.seen[View::ordinary], record.actor)) report_pair(Odds::read_only, record, access, offset, bytes);
    });
}

// A store whose value is known.
inline void Machine::put(void* address, const void* value, std::uint32_t bytes, std::uint32_t site) {
    const std::uint64_t offset = this->offset(address);
    if (!outside(address, bytes, site)) {
        preempt();
        const bool same = allowed(*current, offset, bytes) && std::memcmp(address, value, bytes) == 0;
        touch(offset, bytes, same ? writes | same_value : writes, site);
    }
    std::memcpy(address, value, bytes);
}

// What to say where the writer has fenced, and the reader has a flag of another thread of its block, which has not since they met.
inline std::string Machine::unheard_fence(const Record& record) const {
    const Fiber& writer = *actors_[record.actor].fiber;
    const Actor sender = current ? current->block->heard_from : 0xffff;  // none: a copy reads
    if (!(record.flags() & writes) || sender >= actors_.size() || &writer == actors_[sender].fiber || !writer.block) return "";
    const Ref<Snapshot>& fenced = writer.released[relation(record.actor, record.clock, current->id)];
    if (!fenced || at(fenced->view.seen[View::ordinary], record.actor) < record.clock || relation(record.actor, record.clock, sender) != block_scope) return "";
    const std::string first = std::to_string(writer.index), second = std::to_string(actors_[sender].fiber->index);
    return "the fence of thread " + first + " does not count for the flag of thread " + second + ": fence in the thread that signals";
}

inline void Machine::plain(const void* address, std::uint32_t bytes, std::uint8_t flags, std::uint32_t site) {
    const std::uint64_t offset = this->offset(address);
    if (!memory.holds(offset)) return;
    preempt();
    touch(offset, bytes, flags, site);
}

inline void Machine::preempt() {
    if (--budget_) return;
    budget_ = 1 + random_.below(2 * style_.accesses);
    if (!patience_) leave(State::runnable);
}

}  // namespace peerlane::emulator
