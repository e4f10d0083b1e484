// Who runs next. A schedule is drawn from a seed: how often threads are interrupted, who is slow, when copies happen.
#pragma once

#include "machine.h"

namespace peerlane::emulator {

// ---- switching --------------------------------------------------------------------------------------------------------------------------

inline void Machine::enlist(Fiber& fiber, State state) {
    auto& list = lists_[static_cast<int>(state)];
    fiber.state = state;
    fiber.place = static_cast<std::uint32_t>(list.size());
    list.push_back(&fiber);
}

inline void Machine::delist(Fiber& fiber) {
    auto& list = lists_[static_cast<int>(fiber.state)];
    list[fiber.place] = list.back();
    list[fiber.place]->place = fiber.place;
    list.pop_back();
}

// The current thread stops here until it is resumed. One that has been enlisted meanwhile (it met the others itself) stays so.
inline void Machine::leave(State state) {
    Fiber& fiber = *current;
    if (fiber.state == State::running) enlist(fiber, state);
    peerlane_switch(&fiber.stack_pointer, scheduler_);
}

inline void Machine::wait(const char* what, std::uint32_t site, bool for_copies) {
    Fiber& fiber = *current;
    fiber.waits_for = what;
    fiber.site = site;
    fiber.polled = ~0ull;
    fiber.waits_for_copies = for_copies;
    fiber.state = State::blocked;
    peerlane_switch(&fiber.stack_pointer, scheduler_);
    fiber.waits_for_copies = false;
}

inline void Machine::resume(Fiber& fiber) {
    delist(fiber);
    if (globals.bytes) bring_globals(static_cast<int>(fiber.block->launch->rank));
    fiber.state = State::running;
    current = &fiber;
    peerlane_switch(&scheduler_, fiber.stack_pointer);
    current = nullptr;
    if (fiber.state == State::ended && !aborted_) thread_ends(fiber);
}

inline void Machine::maybe_pause() {
    if (!patience_ && random_.one_in(style_.pause_one_in)) leave(State::runnable);
}

// Called before each access that a thread may be waiting with. Who has polled a while and seen nothing new is run again when there is.
inline void Machine::poll(std::uint64_t offset, std::uint32_t bytes, std::uint32_t site) {
    Fiber& fiber = *current;
    fiber.site = site;
    if (bytes) {
        fiber.polled = offset;
        fiber.polled_bytes = bytes;
        fiber.waits_for = "polls";
    }
    if (fiber.poll_version != version_) {
        fiber.poll_version = version_;
        fiber.polls = 0;
        return;
    }
    if (patience_ ? --patience_ != 0 : ++fiber.polls <= 16) return;
    fiber.polls = 0;
    leave(State::polling);
    fiber.poll_version = version_;
}

inline bool Machine::is_slow(const Fiber& fiber) const {
    return style_.slow_ranks >> fiber.block->launch->rank & 1 || fiber.block->key & style_.slow_parity;
}

inline Fiber* Machine::next() {
    auto& runnable = lists_[0];
    auto& polling = lists_[1];
    if (++schedule_switches_ > max_switches) {
        report({"endless", "the schedule did not end after " + std::to_string(max_switches) + " switches", {}});
        aborted_ = true;
        return nullptr;
    }
    idle_ |= schedule_switches_ > last_write_ + max_idle_switches;
    ++time_;
    if ((schedule_switches_ & 1023) == 0 && !random_.one_in(3)) draw_style();
    if (!copies_.empty() && style_.copy_one_in && random_.one_in(style_.copy_one_in)) {
        copy_goes_on(random_.below(static_cast<std::uint32_t>(copies_.size())));
        if (done()) return nullptr;  // it was the last thing to do
    }
    if (!polling.empty() && (runnable.empty() || random_.one_in(8))) {
        // Someone who polls and has something new to see.
        const auto count = static_cast<std::uint32_t>(polling.size());
        const std::uint32_t start = random_.below(count);
        const std::uint32_t tries = runnable.empty() ? count : std::min(count, 4u);
        for (std::uint32_t i = 0; i < tries; ++i) {
            Fiber* fiber = polling[start + i < count ? start + i : start + i - count];
            if (fiber->poll_version != version_) return fiber;
        }
    }
    if (!runnable.empty()) {
        if (style_.newest_first) return runnable.back();
        Fiber* fiber = runnable[random_.below(static_cast<std::uint32_t>(runnable.size()))];
        for (int i = 0; i < 6 && is_slow(*fiber); ++i) fiber = runnable[random_.below(static_cast<std::uint32_t>(runnable.size()))];
        return fiber;
    }
    if (!copies_.empty()) {
        copy_goes_on(random_.below(static_cast<std::uint32_t>(copies_.size())));
        return nullptr;
    }
    no_progress();
    return nullptr;
}

inline void Machine::draw_style() {
    static constexpr std::uint32_t accesses[] = {8, 64, 512, 1u << 30};
    static constexpr std::uint32_t pauses[] = {1, 2, 8, 64};
    static constexpr std::uint32_t copies[] = {2, 8, 64, 0};
    style_ = {accesses[random_.below(4)], pauses[random_.below(4)], copies[random_.below(4)], random_.one_in(4), 0, 0};
    if (random_.one_in(2)) style_.slow_ranks = random_();
    if (random_.one_in(4)) style_.slow_parity = 1;
    budget_ = 1 + random_.below(2 * style_.accesses);
}

// ---- launches ---------------------------------------------------------------------------------------------------------------------------

inline void Machine::thread_main() {
    Machine& self = *machine;
    Fiber& fiber = *self.current;
    const Launch& launch = *fiber.block->launch;
    launch.kernel(const_cast<void**>(launch.arguments.data()));
    fiber.state = State::ended;
    peerlane_switch(&fiber.stack_pointer, self.scheduler_);
    std::abort();
}

// How many blocks of a launch can be there at a time.
inline std::uint32_t Machine::places(const Launch& launch) {
    const std::uint32_t resident = std::max(launch.resident_blocks, launch.cluster) / launch.cluster * launch.cluster;
    return std::min(launch.grid.x * launch.grid.y * launch.grid.z, resident);
}

inline void Machine::start_blocks() {
    for (Stream& stream : streams_) {
        while (stream.next_launch < stream.launches.size()) {
            const Uint3& grid = stream.launches[stream.next_launch].grid;
            const std::uint32_t cluster = stream.launches[stream.next_launch].cluster;
            const std::uint32_t limit = std::max(stream.launches[stream.next_launch].resident_blocks, cluster);
            if (stream.next_block >= grid.x * grid.y * grid.z || resident_[stream.rank] + cluster > limit) break;
            if (stream.next_block == 0) draw_order(stream);
            if (stream.scarce && stream.free.empty()) break;
            Block& first = start_block(stream);
            first.cluster = &first;
            for (Block* last = &first; last->key + 1 < first.key + static_cast<int>(cluster); last = last->next) {
                last->next = &start_block(stream);
                last->next->cluster = &first;
            }
        }
    }
}

// A GPU may start blocks in any order. That shows only where some have to wait for others to end. Then schedules take turns: by their numbers,
// on every second rank from the end, and anyhow.
inline void Machine::draw_order(Stream& stream) {
    const Launch& launch = stream.launches[stream.next_launch];
    const std::uint32_t clusters = launch.grid.x * launch.grid.y * launch.grid.z / launch.cluster;
    stream.order.clear();
    stream.free.clear();
    stream.scarce = places(launch) < launch.grid.x * launch.grid.y * launch.grid.z;
    for (std::uint32_t at = places(launch); stream.scarce && at; at -= launch.cluster) stream.free.push_back(at - launch.cluster);
    const bool backward = schedule_ % 4 == 1 ? stream.rank % 2 == 1 : schedule_ % 4 == 3 && stream.rank % 2 == 0;
    const bool shuffled = schedule_ % 4 == 2;
    if (clusters * launch.cluster <= launch.resident_blocks || launch.in_order || !(backward || shuffled)) return;
    for (std::uint32_t i = 0; i < clusters; ++i) stream.order.push_back(backward ? clusters - 1 - i : i);
    for (std::uint32_t i = clusters; shuffled && i > 1; --i) std::swap(stream.order[i - 1], stream.order[random_.below(i)]);
}

// Puts a rank's device variables where its code expects them.
inline void Machine::bring_globals(int rank) {
    if (globals.rank == rank) return;
    const auto kept = [&](int of) {
        const std::uint64_t begin = memory.buffers()[globals.buffers[of]].begin;
        return memory.address(begin);
    };
    if (globals.rank >= 0) std::memcpy(kept(globals.rank), globals.section, globals.bytes);
    if (rank >= 0) std::memcpy(globals.section, kept(rank), globals.bytes);
    globals.rank = rank;
}

inline Block& Machine::start_block(Stream& stream) {
    const Launch& launch = stream.launches[stream.next_launch];
    const std::uint32_t turn = stream.next_block++;
    const std::uint32_t number =
        stream.order.empty() ? turn : stream.order[turn / launch.cluster] * launch.cluster + turn % launch.cluster;
    std::uint32_t place = number;
    if (stream.scarce) {
        place = stream.free.back() + turn % launch.cluster;
        if ((turn + 1) % launch.cluster == 0) stream.free.pop_back();
    }
    const std::uint64_t at_shared = stream.shared + place * stream.shared_stride;
    Block& block = blocks_.emplace_back();
    block.launch = &launch;
    block.stream = &stream;
    block.start = stream.view;
    block.index = unfold(number, launch.grid);
    block.key = stream.first_block + static_cast<int>(place);
    block.dynamic_shared = at_shared;
    block.static_shared = at_shared + stream.static_shared;
    block.threads = block.live = launch.block.x * launch.block.y * launch.block.z;
    block.first = stream.first_fiber + std::size_t(place) * stream.max_threads;
    block.warps.resize((block.threads + 31) / 32);
    // What lies in shared memory at the start is nobody's: not a number, in every format.
    std::memset(memory.address(block.dynamic_shared), 0xff, launch.shared_bytes);
    std::memset(memory.address(block.static_shared), 0xff, static_shared_bytes_);
    shadow_.forget(block.dynamic_shared, launch.shared_bytes);
    shadow_.forget(block.static_shared, static_shared_bytes_);
    if (stream.scarce) shadow_.clear(block.dynamic_shared, launch.shared_bytes), shadow_.clear(block.static_shared, static_shared_bytes_);
    for (std::uint32_t i = 0; i < block.threads; ++i) {
        Fiber& fiber = block.first[i];
        fiber.block = &block;
        fiber.index = i;
        fiber.thread = unfold(i, launch.block);
        fiber.view = stream.view;
        fiber.begins.push_back({fiber.start = fiber.clock, &block});
        fiber.host = false;
        fiber.halfway = ~0ull;
        fiber.torn = {};
        fiber.heard_fenced = Ref<Vector>();
        for (int s = 0; s < scopes; ++s) fiber.released[s] = Ref<Snapshot>(), fiber.pending[s].clear();
        fiber.initialised = Ref<Snapshot>();
        for (Groups& groups : fiber.groups) groups.closed.clear(), groups.open.clear();
        fiber.poll_version = 0;
        fiber.polls = 0;
        fiber.stack_pointer = stacks_->prepare(fiber.id, &thread_main);
        block.warps[i / 32].live |= 1u << i % 32;
        enlist(fiber, State::runnable);
    }
    ++stream.live_blocks;
    ++resident_[stream.rank];
    ++version_;
    return block;
}

// The next launch begins when nothing of this one is left, and knows all of it, whatever the proxy. One that may overlap with this one begins
// then, too, but knows no more than this one did, until it waits.
inline void Machine::stream_goes_on(Stream& stream) {
    const Uint3& grid = stream.launches[stream.next_launch].grid;
    if (stream.live_blocks || stream.copies || stream.next_block < grid.x * grid.y * grid.z) return;
    Ref<Vector>& known = stream.end.seen[View::ordinary];
    for (std::uint32_t i = 0; i < stream.max_blocks * stream.max_threads; ++i) {
        for (const Slot& slot : stream.first_fiber[i].slots) {
            if (!slot.remote) set(known, slot.actor, slot.clock);
        }
    }
    View& after = stream.before;
    Ref<Vector> boundary = join(known, stream.end.seen[View::boundary]), reads = join(boundary, stream.end.seen[View::reads]);
    const Ref<Vector> fenced = join(stream.before.seen[View::fenced], stream.end.seen[View::fenced]);  // the end itself is no fence
    for (Ref<Vector>& seen : after.seen) seen = join(known, stream.before.seen[View::ordinary]);
    after.seen[View::fenced] = fenced;
    after.seen[View::boundary] = join(boundary, after.seen[View::ordinary]), after.seen[View::reads] = join(reads, after.seen[View::ordinary]);
    const bool overlaps = stream.next_launch + 1 < stream.launches.size() && stream.launches[stream.next_launch + 1].dependent;
    if (!overlaps) stream.view = after;
    stream.end = View{};
    stream.next_block = 0;
    ++stream.next_launch;
    ++version_;
    start_blocks();
}

// ---- when nobody can go on --------------------------------------------------------------------------------------------------------------

// First everybody who polls may poll on, while the clock moves in small steps: someone may only be passing time. Then the clock jumps, so
// that waits with a deadline end and say what they waited for.
inline void Machine::no_progress() {
    if (!asking_.empty()) return warp_concludes(*asking_.back(), false);
    for (const bool desperate : {false, true}) {
        std::vector<Fiber*> stuck = lists_[1];
        for (std::size_t i = stuck.size(); i > 1; --i) std::swap(stuck[i - 1], stuck[random_.below(static_cast<std::uint32_t>(i))]);
        if (desperate && stuck.size() > 16) stuck.resize(16);
        const std::uint64_t version = version_;
        desperate_ = desperate;
        time_step_ = desperate ? 1'000'000'000'000 : 1000;
        wrote_ = false;
        for (Fiber* fiber : stuck) {
            patience_ = desperate ? 5000 : 64;
            resume(*fiber);
            patience_ = 0;
            if (aborted_ || wrote_ || version_ != version || fiber->state != State::polling) {
                desperate_ = false;
                return;
            }
        }
    }
    desperate_ = false;
    deadlock();
}

inline void Machine::deadlock() {
    if (globals.bytes) bring_globals(-1);  // polled words are read below
    Finding finding{"deadlock", unstarted(), {}};
    std::map<std::tuple<std::uint32_t, std::uint32_t>, std::pair<std::size_t, int>> known;  // rank and site: side and threads
    for (const Fiber& fiber : fibers_) {
        if (!fiber.block || fiber.state == State::ended) continue;
        const auto [entry, is_new] = known.try_emplace({fiber.block->launch->rank, fiber.site}, finding.sides.size(), 0);
        if (is_new && finding.sides.size() < 12) {
            Side waiting = side(fiber, fiber.waits_for);
            if (memory.holds(fiber.polled)) {
                waiting.buffer = static_cast<int>(memory.number_at(fiber.polled));
                waiting.offset = fiber.polled - memory.buffers()[waiting.buffer].begin;
                waiting.action += " and sees";
                for (std::uint32_t i = 0; i < fiber.polled_bytes; i += 4) {
                    std::uint32_t word = 0;
                    std::memcpy(&word, memory.address(fiber.polled) + i, std::min(4u, fiber.polled_bytes));
                    waiting.action += " " + std::to_string(word);
                }
            }
            finding.sides.push_back(std::move(waiting));
        }
        ++entry->second.second;
    }
    for (const auto& [place, entry] : known) {
        if (entry.first < finding.sides.size() && entry.second > 1) {
            finding.sides[entry.first].action += " (with " + std::to_string(entry.second - 1) + " other threads of this rank)";
        }
    }
    report(std::move(finding));
    aborted_ = true;
}

inline std::string Machine::unstarted() const {
    std::string text;
    for (const Stream& stream : streams_) {
        if (stream.next_launch == stream.launches.size()) continue;
        const Uint3& grid = stream.launches[stream.next_launch].grid;
        if (const std::uint32_t left = grid.x * grid.y * grid.z - stream.next_block) {
            text += (text.empty() ? "" : "; ") + std::to_string(left) + " blocks of rank " + std::to_string(stream.rank) +
                    " have not started: only " + std::to_string(stream.launches[stream.next_launch].resident_blocks) +
                    " are resident at a time, and a GPU starts them in any order";
        }
    }
    return text;
}

// What a wait of the kit left behind, if it did: the words of peerlane::FaultRecord, the first of which says so.
inline std::vector<std::uint32_t> Machine::fault(std::uint32_t rank) const {
    if (rank >= fault_buffers.size()) return {};
    const Buffer& buffer = memory.buffers()[fault_buffers[rank]];
    std::vector<std::uint32_t> words((buffer.end - buffer.begin) / sizeof(std::uint32_t));
    std::memcpy(words.data(), memory.address(buffer.begin), words.size() * sizeof(std::uint32_t));
    return words[0] ? words : std::vector<std::uint32_t>();
}

}  // namespace peerlane::emulator
