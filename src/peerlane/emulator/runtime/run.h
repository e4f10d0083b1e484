// The run from the host's description to the end: everything is laid out once, then schedule follows schedule.
#pragma once

#include "copies.h"
#include "groups.h"
#include "machine.h"
#include "order.h"
#include "races.h"
#include "schedule.h"

namespace peerlane::emulator {

inline std::uint64_t whole_pages(std::uint64_t bytes) { return (bytes + page_bytes - 1) / page_bytes * page_bytes; }

// Threads have a number for the whole run, by stream, place of the block and place in the block. Blocks of one place use the same shared memory:
// those of all launches with this number, and where a launch has more blocks than fit, several of one launch in turn. Who knows what the later
// ones did then counts as knowing what the earlier ones did.
inline void Machine::prepare(
    std::uint64_t base, std::vector<Buffer> buffers, const std::vector<Content>& contents, std::uint64_t static_shared_bytes) {
    static_shared_bytes_ = static_shared_bytes;
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> index;
    std::uint32_t ranks = 1;
    for (Launch& launch : launches) {
        const auto [entry, is_new] = index.try_emplace({launch.rank, launch.stream}, streams_.size());
        if (is_new) streams_.emplace_back().rank = launch.rank;
        Stream& stream = streams_[entry->second];
        ranks = std::max(ranks, launch.rank + 1);
        launch.number = static_cast<std::uint32_t>(stream.launches.size());
        stream.max_blocks = std::max(stream.max_blocks, places(launch));
        stream.max_threads = std::max(stream.max_threads, launch.block.x * launch.block.y * launch.block.z);
        stream.max_shared_bytes = std::max(stream.max_shared_bytes, launch.shared_bytes);
        stream.launches.push_back(launch);
    }
    std::uint64_t end = 0;
    for (const Buffer& buffer : buffers) end = std::max(end, buffer.end);
    std::size_t threads = 0;
    int blocks = 0;
    for (Stream& stream : streams_) {
        stream.first_block = blocks;
        stream.shared = whole_pages(end) + page_bytes;
        stream.static_shared = whole_pages(stream.max_shared_bytes) + page_bytes;
        stream.shared_stride = stream.static_shared + whole_pages(static_shared_bytes) + page_bytes;
        for (std::uint32_t i = 0; i < stream.max_blocks; ++i, ++blocks) {
            const int rank = static_cast<int>(stream.rank);
            const std::uint64_t dynamic = stream.shared + i * stream.shared_stride, fixed = dynamic + stream.static_shared;
            buffers.push_back({dynamic, dynamic + stream.max_shared_bytes, rank, blocks});
            buffers.push_back({fixed, fixed + static_shared_bytes, rank, blocks});
        }
        end = stream.shared + stream.max_blocks * stream.shared_stride;
        threads += std::size_t(stream.max_blocks) * stream.max_threads;
    }
    memory.map(base, std::move(buffers), contents);
    shadow_.map(memory.bytes());
    handover_of_ = reinterpret_cast<std::uint32_t*>(Memory::reserve(nullptr, memory.bytes(), 0));
    stacks_ = std::make_unique<Stacks>(threads);
    resident_.assign(ranks, 0);
    fibers_.resize(threads);
    std::size_t next = 0;
    for (Stream& stream : streams_) {
        stream.first_fiber = &fibers_[next];
        for (std::uint32_t i = 0; i < stream.max_blocks * stream.max_threads; ++i, ++next) {
            fibers_[next].id = static_cast<Actor>(next);
            fibers_[next].clock = Vector::floor + 1;
            const int block = stream.first_block + static_cast<int>(i / stream.max_threads);
            actors_.push_back({&fibers_[next], static_cast<int>(stream.rank), block, false});
        }
    }
    Vector::actors = static_cast<std::uint32_t>(actors_.size());
}

inline bool Machine::done() const {
    return std::all_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.next_launch == s.launches.size(); });
}

inline void Machine::run(int schedule, std::uint64_t seed) {
    schedule_ = schedule;
    random_ = Random(seed * 1'000'003 + static_cast<std::uint64_t>(schedule));
    for (int i = 0; i < 4; ++i) random_();
    memory.restore();
    for (const Buffer& buffer : memory.buffers()) {
        if (buffer.unwritten) shadow_.forget(buffer.begin, buffer.end - buffer.begin);
    }
    globals.rank = -1;  // what the section holds is of the last schedule
    time_ = 1'000'000 + random_.below(1'000'000);
    aborted_ = false;
    schedule_switches_ = 0;
    draw_style();
    start_blocks();
    while (!aborted_ && !done()) {
        if (Fiber* fiber = next()) resume(*fiber);
    }
    while (!aborted_ && !copies_.empty()) copy_goes_on(random_.below(static_cast<std::uint32_t>(copies_.size())));  // messages
    switches += schedule_switches_;
    if (globals.bytes) bring_globals(-1);
    if (!aborted_) compare();
    clear();
}

inline void Machine::abandon(const char* kind, const char* what) {
    report({kind, what, {side(*current, std::strcmp(kind, "misaligned_address") ? "goes wrong after this place" : "uses such an address")}});
    switches += schedule_switches_;
    clear();
}

inline void Machine::compare() {
    for (std::size_t i = 1; i < memory.buffers().size(); ++i) {
        const Buffer& buffer = memory.buffers()[i];
        const std::uint64_t found = memory.first_difference(buffer);
        if (found == buffer.end) continue;
        Finding finding{"wrong_result", "", {}};
        finding.buffer = static_cast<int>(i);
        finding.offset = found - buffer.begin;
        const auto* bytes = reinterpret_cast<const unsigned char*>(memory.address(found / 8 * 8));
        for (int k = 0; k < 8; ++k) {
            char text[3];
            std::snprintf(text, sizeof text, "%02x", bytes[k]);
            finding.detail += text;
        }
        for (const Fiber& fiber : fibers_) {
            if (!fiber.torn.first || !finding.sides.empty()) continue;
            finding.sides = {side(fiber, "goes on with half of a store of 16 bytes"), side(fiber, "loads what was stored")};
            finding.sides[0].site = fiber.torn.first, finding.sides[1].site = fiber.torn.second;
        }
        if (ordered_ && buffer.any_order && finding.sides.empty()) finding.kind = "order_of_atomics";
        report(std::move(finding));
    }
}

inline void Machine::clear() {
    current = nullptr;
    patience_ = 0;
    desperate_ = idle_ = ordered_ = false;
    asking_.clear();
    last_write_ = 0;
    halfway_.clear();
    copies_.clear();
    handovers_.clear();
    for (auto& list : lists_) list.clear();
    for (std::uint32_t& count : resident_) count = 0;
    Clock floor = Vector::floor;
    for (Fiber& fiber : fibers_) {
        floor = std::max(floor, fiber.clock);
        for (const Slot& slot : fiber.slots) floor = std::max(floor, slot.clock);
        fiber.begins.clear();
        fiber.block = nullptr;
        fiber.state = State::ended;
        fiber.view = View{};
        fiber.heard_boundary = fiber.heard_reads = fiber.heard_fenced = Ref<Vector>();
        for (int s = 0; s < scopes; ++s) fiber.released[s] = Ref<Snapshot>(), fiber.pending[s].clear();
        fiber.initialised = Ref<Snapshot>();
        for (Groups& groups : fiber.groups) groups.closed.clear(), groups.open.clear();
    }
    for (Fiber& fiber : fibers_) fiber.clock = floor + 1;
    for (Stream& stream : streams_) {
        stream.next_launch = 0;
        stream.next_block = stream.live_blocks = 0;
        stream.view = stream.before = stream.end = View{};
        stream.copies = 0;
    }
    blocks_.clear();
    Vector::floor = floor;
}

}  // namespace peerlane::emulator
