// Asynchronous operations: mbarriers, and copies that read and write at a time of their own.
#pragma once

#include "../include/peerlane_emulator/half.h"
#include "machine.h"

namespace peerlane::emulator {

// ---- mbarriers --------------------------------------------------------------------------------------------------------------------------

inline void Machine::mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals, std::uint32_t site) {
    maybe_pause();
    const std::uint64_t offset = memory.offset(barrier);
    touch(offset, 8, writes, site);
    std::deque<Mbarrier>& all = current->block->mbarriers;
    Mbarrier* known = current->block->mbarrier(offset);
    if (!known) known = &all.emplace_back();
    *known = Mbarrier{offset, arrivals, arrivals, 0, 0, {}, {}};
}

inline void Machine::mbarrier_init_fence() {
    proxy_fence(shared_proxy);
    current->initialised = snapshot(*current);
}

// The block of the current one's cluster in whose shared memory this lies.
inline Block& Machine::owner(std::uint64_t offset, std::uint32_t site) {
    const int key = memory.holds(offset) ? memory.buffers()[memory.number_at(offset)].block : -1;
    Block* block = current->block->cluster;
    while (block && block->key != key) block = block->next;
    if (!block || !block->live) {
        current->site = site;
        const char* what = block ? "shared memory of a block of the cluster that has ended" : "an address that is not in this cluster's shared memory";
        fatal({"misuse", what, {side(*current, "uses it")}});
    }
    return *block;
}

inline Mbarrier& Machine::find_mbarrier(const std::uint64_t* barrier, std::uint32_t site) {
    const std::uint64_t offset = memory.offset(barrier);
    Mbarrier* known = owner(offset, site).mbarrier(offset);
    if (!known) {
        current->site = site;
        fatal({"misuse", "an mbarrier that nobody has initialised before", {side(*current, "uses an mbarrier")}});
    }
    return *known;
}

// Among the blocks of a cluster mbarriers count for all of them.
inline std::uint8_t mbarrier_scope(const Block& block) {
    return static_cast<std::uint8_t>((block.launch->cluster > 1 ? gpu_scope : block_scope) << scope_shift);
}

inline void Machine::end_phase(Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.ended = std::exchange(barrier.meeting.sum, View{});
    barrier.meeting.last = View{};
    barrier.pending = barrier.expected;
    ++barrier.phase;
    ++version_;
}

inline std::uint32_t Machine::mbarrier_arrive(
    std::uint64_t* barrier, std::uint32_t bytes, std::uint32_t arrivals, bool drop, std::uint32_t site) {
    maybe_pause();
    Mbarrier& known = find_mbarrier(barrier, site);
    touch(known.offset, 8, writes | updates | atomic | mbarrier_scope(*current->block), site);
    if (known.pending < arrivals) {
        current->site = site;
        fatal({"misuse", "more arrivals in a phase of an mbarrier than it was initialised for", {side(*current, "arrives")}});
    }
    if (Block& block = owner(known.offset, site); arrivals && &block != current->block) block.arrivals[current->id] = {current->clock, site};
    const std::uint32_t phase = known.phase;
    known.bytes += bytes;
    if (!arrivals) return phase;
    contribute(known.meeting, *current);
    known.pending -= arrivals;
    if (drop) known.expected -= arrivals;
    end_phase(known);
    return phase;
}

inline bool Machine::mbarrier_try_wait(std::uint64_t* barrier, std::uint32_t parity, std::uint32_t site) {
    maybe_pause();
    Mbarrier& known = find_mbarrier(barrier, site);
    poll(known.offset, 8, site);
    touch(known.offset, 8, atomic | mbarrier_scope(*current->block), site);
    if ((known.phase & 1) == parity) return false;
    current->view.absorb(known.ended);
    current->polls = 0;
    return true;
}

// ---- issue and wait ---------------------------------------------------------------------------------------------------------------------

inline Slot& Machine::free_slot(Fiber& fiber) {
    for (Slot& slot : fiber.slots) {
        if (at(fiber.view.seen[View::ordinary], slot.actor) >= slot.clock) return slot;
    }
    if (actors_.size() >= 0xffff) {
        std::fprintf(stderr, "peerlane emulator: more than 65535 threads and copies under way; check a smaller case\n");
        std::exit(1);
    }
    const auto actor = static_cast<Actor>(actors_.size());
    actors_.push_back({&fiber, static_cast<int>(fiber.block->launch->rank), fiber.block->key, true});
    Vector::actors = static_cast<std::uint32_t>(actors_.size());
    fiber.slots.push_back({actor, Vector::floor});
    return fiber.slots.back();
}

inline void Machine::async(
    const Segment* segments, std::uint32_t count, Combine combine, std::uint64_t* barrier, unsigned queue, std::uint32_t site) {
    maybe_pause();
    Fiber& fiber = *current;
    fiber.site = site;
    if (barrier) find_mbarrier(barrier, site);
    bool reads_shared = false, writes_shared = false;
    Block* uses = fiber.block;
    for (const Segment* segment = segments; segment != segments + count; ++segment) {
        for (const void* end : {static_cast<const void*>(segment->target), segment->source}) {
            const std::uint64_t offset = memory.offset(end);
            if (end && memory.holds(offset) && allowed(fiber, offset, segment->bytes)) {
                if (!is_shared(offset)) continue;
                (end == segment->source ? reads_shared : writes_shared) = true;
                uses = &owner(offset, site);
            } else if (end) {
                Finding finding{"illegal_address", "", {side(fiber, end == segment->source ? "copies from here" : "copies to here")}};
                locate(finding, offset);
                fatal(std::move(finding));
            }
        }
    }
    auto copy = issue(segments, count, reads_shared, writes_shared, uses);
    copy->combine = combine;
    copy->generic = queue == thread_queue;
    copy->barrier = barrier ? memory.offset(barrier) : ~0ull;
    copy->barrier_block = barrier ? &owner(copy->barrier, site) : nullptr;
    if (!barrier) fiber.groups[queue].open.push_back(copy);
}

inline void Machine::async_aligned(const void* address, std::uint32_t alignment, std::uint32_t site) {
    const std::uint64_t offset = memory.offset(address);
    if (offset % alignment == 0) return;
    Fiber& fiber = *current;
    fiber.site = site;
    Finding finding{"misaligned_address", "such a copy needs an address that is a multiple of " + std::to_string(alignment), {side(fiber, "copies")}};
    if (memory.holds(offset)) locate(finding, offset);
    fatal(std::move(finding));
}

inline void Machine::async_bulk(const Segment& whole, Combine combine, std::uint64_t* barrier, std::uint32_t site) {
    async_aligned(whole.target, 16, site);
    async_aligned(whole.source, 16, site);
    if (whole.bytes % 16) {
        current->site = site;
        fatal({"misaligned_address", "a bulk copy of " + std::to_string(whole.bytes) + " bytes: expected a multiple of 16", {side(*current, "copies")}});
    }
    async(&whole, 1, combine, barrier, bulk_queue, site);
}

// Starts an operation of the current thread, under a number of its own.
inline std::shared_ptr<Copy> Machine::issue(
    const Segment* segments, std::uint32_t count, bool reads_shared, bool writes_shared, Block* uses) {
    Fiber& fiber = *current;
    Slot& slot = free_slot(fiber);
    auto copy = std::make_shared<Copy>();
    copy->issuer = &fiber;
    copy->block = fiber.block;
    copy->stream = fiber.block->stream;
    copy->actor = slot.actor;
    copy->slot = static_cast<std::size_t>(&slot - fiber.slots.data());
    copy->clock = std::max(slot.clock, Vector::floor) + 1;
    copy->view = snapshot(fiber)->view;
    copy->segments.assign(segments, segments + count);
    copy->combine = Combine::replace;
    copy->barrier = ~0ull;
    copy->barrier_block = nullptr;
    copy->site = fiber.site;
    slot.clock = copy->clock + 1;
    slot.must_know = writes_shared ? slot.clock : reads_shared ? copy->clock : Vector::floor;
    slot.site = fiber.site;
    slot.block = uses;
    slot.remote = false;
    ++copy->stream->copies;
    copies_.push_back(copy);
    ++version_;
    return copy;
}

// ---- the second tier: messages to memory of other nodes ------------------------------------------------------------------------------------

inline void Machine::check_remote(const void* end, std::uint32_t bytes, const char* action) {
    const std::uint64_t offset = memory.offset(end);
    const Buffer* buffer = memory.holds(offset) ? &memory.buffers()[memory.number_at(offset)] : nullptr;
    if (buffer && buffer->block < 0 && offset >= buffer->begin && offset + bytes <= buffer->end) return;
    Finding finding{"illegal_address", "messages go from and to global memory of one rank", {side(*current, action)}};
    locate(finding, offset);
    fatal(std::move(finding));
}

inline void Machine::remote(
    void* target, const void* source, std::uint32_t bytes, std::uint64_t* counter, std::uint64_t add, std::uint32_t site) {
    maybe_pause();
    current->site = site;
    if (bytes) {
        check_remote(target, bytes, "puts to here");
        check_remote(source, bytes, "puts from here");
    }
    if (counter) check_remote(counter, sizeof *counter, "signals here");
    const Segment whole{target, source, bytes};
    const std::shared_ptr<Copy> copy = issue(&whole, bytes ? 1 : 0, false, false, current->block);
    copy->remote = current->slots[copy->slot].remote = true;
    --copy->stream->copies;
    copy->counter = counter ? memory.offset(counter) : ~0ull;
    copy->add = add;
    current->groups[remote_queue].open.push_back(copy);
}

// Adds to the counter, and hands on what the message's thread knew when it was sent, with the message's own bytes.
inline void Machine::signal(Copy& copy) {
    copy_access(copy, copy.counter, sizeof copy.add, writes | updates | atomic | system_scope << scope_shift, copy.clock + 1);
    std::uint64_t value;
    std::memcpy(&value, memory.address(copy.counter), sizeof value);
    value += copy.add;
    std::memcpy(memory.address(copy.counter), &value, sizeof value);
    Handover& handed = make_handover(copy.counter, copy.actor);
    const Ref<Snapshot> before = handed.released[relation(handed.writer, handed.written, copy.actor)];
    const Ref<Snapshot> now(new Snapshot(copy.view));
    set(now->view.seen[View::ordinary], copy.actor, copy.clock + 1);
    if (before) now->view.absorb(before->view);
    handed.writer = copy.actor;
    for (unsigned s = 0; s < scopes; ++s) handed.released[s] = now;
}

inline void Machine::async_commit(unsigned queue) {
    Groups& groups = current->groups[queue];
    groups.closed.push_back(std::exchange(groups.open, {}));
}

inline void Machine::async_wait(unsigned queue, std::uint32_t pending, bool sources_only, std::uint32_t site) {
    maybe_pause();
    Fiber& fiber = *current;
    auto& groups = fiber.groups[queue].closed;
    const std::size_t count = groups.size() > pending ? groups.size() - pending : 0;
    for (std::size_t i = 0; i < count; ++i) {
        for (const auto& copy : groups[i]) {
            while (copy->stage < (sources_only ? Copy::read : Copy::written)) wait("waits for copies", site, true);
            const Clock clock = sources_only ? copy->clock : copy->clock + 1;
            if (at(fiber.view.seen[View::ordinary], copy->actor) < clock) set(fiber.view.seen[View::ordinary], copy->actor, clock);
        }
    }
    if (!sources_only) groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(count));
}

// ---- what copies do ---------------------------------------------------------------------------------------------------------------------

inline bool Machine::copy_judges(
    Copy& copy, const Record& record, std::uint16_t part, const Access& access, std::uint64_t offset, std::uint32_t bytes) {
    if (record.actor == access.actor) return true;
    if (record.clock <= at(copy.view.seen[View::ordinary], record.actor)) {
        const auto kind = is_shared(offset) ? View::async_shared : View::async_global;
        // Arrivals at an mbarrier are of no proxy.
        const bool written = record.flags() & writes && !(record.flags() & asynchronous) && !(record.flags() & access.flags & atomic);
        const bool ordinary = copy.remote || copy.generic;
        if (written && !ordinary && record.clock > at(copy.view.seen[kind], record.actor)) report_pair(Odds::proxy_fence, record, access, offset, bytes);
        return true;
    }
    Odds kind = odds(record, part, access);
    if (kind == Odds::none) return false;
    if (record.clock <= at(copy.view.seen[View::boundary], record.actor)) kind = Odds::boundary;
    report_pair(kind, record, access, offset, bytes);
    return true;
}

inline void Machine::copy_access(Copy& copy, std::uint64_t offset, std::uint32_t bytes, std::uint8_t flags, Clock clock) {
    const auto how = static_cast<std::uint8_t>(copy.generic ? flags : flags | asynchronous);
    const Access access{copy.actor, how, clock, copy.site};
    if (flags & writes) {
        memory.written(offset, bytes);
        last_write_ = schedule_switches_;
    }
    shadow_.access(offset, bytes, access, [&](const Record& record, std::uint16_t part) {
        return copy_judges(copy, record, part, access, offset, bytes);
    });
}

// First all sources are read, at some later time all targets are written.
inline void Machine::copy_goes_on(std::size_t index) {
    const std::shared_ptr<Copy> copy = copies_[index];
    std::uint64_t total = 0;
    bool targets = false;
    for (const Segment& segment : copy->segments) total += segment.bytes, targets |= segment.target != nullptr;
    std::size_t at_byte = 0;
    if (copy->stage == Copy::issued) {
        copy->data.resize(targets ? total : 0);
        for (const Segment& segment : copy->segments) {
            if (segment.source) copy_access(*copy, memory.offset(segment.source), segment.bytes, 0, copy->clock);
            if (segment.source && targets) std::memcpy(&copy->data[at_byte], segment.source, segment.bytes);
            at_byte += segment.bytes;
        }
        copy->stage = Copy::read;
    } else {
        // An adding copy adds in one step, at the memory that it adds to.
        constexpr std::uint8_t adds = writes | updates | atomic | system_scope << scope_shift;
        const std::uint8_t how = copy->combine == Combine::replace ? std::uint8_t(writes) : adds;
        ordered_ |= copy->combine != Combine::replace && copy->combine != Combine::add_u32;  // floats
        for (const Segment& segment : copy->segments) {
            if (segment.target) {
                copy_access(*copy, memory.offset(segment.target), segment.bytes, how, copy->clock + 1);
                combine(copy->combine, segment.target, &copy->data[at_byte], segment.bytes);
            }
            at_byte += segment.bytes;
        }
        if (copy->counter != ~0ull) signal(*copy);
        copy->stage = Copy::written;
        if (copy->barrier != ~0ull) {
            Mbarrier& barrier = *copy->barrier_block->mbarrier(copy->barrier);
            copy_access(*copy, copy->barrier, 8, writes | updates | atomic | mbarrier_scope(*copy->block), copy->clock + 1);
            set(barrier.meeting.sum.seen[View::ordinary], copy->actor, copy->clock + 1);
            barrier.bytes -= static_cast<std::int64_t>(total);
            end_phase(barrier);
        }
        std::swap(copies_[index], copies_.back());
        copies_.pop_back();
        if (!copy->remote) {
            --copy->stream->copies;
            stream_goes_on(*copy->stream);
        }
    }
    ++version_;
    if (copy->issuer->state == State::blocked && copy->issuer->waits_for_copies) enlist(*copy->issuer, State::runnable);
}

}  // namespace peerlane::emulator
