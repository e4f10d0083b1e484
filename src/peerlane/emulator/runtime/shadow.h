// Which accesses to each byte a new one must still be compared with.
//
// Sixteen bytes share a cell: a chain of records, each with the bytes it touched. A record goes when a later access makes it superfluous:
// whoever is unordered with it is unordered with the later one too. So every unordered pair is found, in whatever order a schedule runs it.
#pragma once

#include "clock.h"
#include "memory.h"

namespace peerlane::emulator {

// How an access was made. The scope's two bits count for atomic accesses only.
enum Flags : std::uint8_t {
    writes = 1,
    atomic = 2,
    updates = 4,       // reads and writes in one step
    asynchronous = 8,  // by a bulk copy or a matrix unit
    scope_shift = 4,
    same_value = 64,   // stored what was there already
};

struct Access {
    Actor actor;
    std::uint8_t flags;
    Clock clock;
    std::uint32_t site;  // offset of the code in the program
};

struct Record {
    Clock clock;  // 0: empty
    std::uint32_t site;
    std::uint32_t next_and_flags;  // 24 bits for the next record of the chain, 0 for none
    Actor actor;
    std::uint16_t bytes;  // one bit each

    std::uint32_t next() const { return next_and_flags >> 8; }
    std::uint8_t flags() const { return next_and_flags & 0xff; }
    void link(std::uint32_t next) { next_and_flags = next << 8 | flags(); }
};
static_assert(sizeof(Record) == cell_bytes);

class Shadow {
  public:
    void map(std::uint64_t memory_bytes) {
        cells_ = reinterpret_cast<Record*>(Memory::reserve(nullptr, memory_bytes, 0));
        unwritten_ = reinterpret_cast<std::uint16_t*>(Memory::reserve(nullptr, memory_bytes / cell_bytes * sizeof(std::uint16_t), 0));
        pool_ = reinterpret_cast<Record*>(Memory::reserve(nullptr, (std::uint64_t(chunk_records) << 24) * sizeof(Record), 0));
    }

    // From now on nobody has written these bytes, which begin at a cell.
    void forget(std::uint64_t offset, std::uint64_t size) {
        std::memset(unwritten_ + offset / cell_bytes, 0xff, (size + cell_bytes - 1) / cell_bytes * sizeof(std::uint16_t));
    }

    // Forgets all accesses to these bytes, which begin at a cell.
    void clear(std::uint64_t offset, std::uint64_t size) {
        for (std::uint64_t cell = offset / cell_bytes; cell * cell_bytes < offset + size; ++cell) {
            Record& head = cells_[cell];
            while (const std::uint32_t next = head.next()) {
                Record* const chunk = chunk_at(next);
                head.link(chunk->next());
                for (std::uint32_t i = 0; i < chunk_records; ++i) chunk[i].clock = 0;
                chunk->link(free_);
                free_ = next;
            }
            head.clock = 0;
        }
    }

    // Notes an access and calls judge(record, bytes) for each earlier one to some of the same bytes; it says whether the earlier
    // one happened before. Returns whether somebody has written some of the bytes that it reads.
    template <class Judge>
    bool access(std::uint64_t offset, std::uint32_t size, const Access& access, const Judge& judge) {
        bool known = false;
        while (size) {
            const std::uint32_t within = offset % cell_bytes;
            const std::uint32_t part = std::min<std::uint32_t>(size, cell_bytes - within);
            const auto bytes = static_cast<std::uint16_t>(((1u << part) - 1) << within);
            std::uint16_t& unwritten = unwritten_[offset / cell_bytes];
            known |= (access.flags & (writes | updates)) == writes || (unwritten & bytes) != bytes;
            if (access.flags & writes) unwritten &= static_cast<std::uint16_t>(~bytes);
            note(cells_[offset / cell_bytes], bytes, access, judge);
            offset += part;
            size -= part;
        }
        return known;
    }

    // Calls judge(record) for each write that is known, to some of these bytes of one cell.
    template <class Judge>
    void writes_to(std::uint64_t offset, std::uint32_t size, const Judge& judge) {
        const auto bytes = static_cast<std::uint16_t>(((1u << std::min<std::uint32_t>(size, cell_bytes)) - 1) << offset % cell_bytes);
        const auto look = [&](const Record& record) {
            if (record.clock && record.bytes & bytes && record.flags() & writes) judge(record);
        };
        const Record* chunk = &cells_[offset / cell_bytes];
        for (look(*chunk); chunk->next();) {
            chunk = chunk_at(chunk->next());
            for (std::uint32_t i = 0; i < chunk_records; ++i) look(chunk[i]);
        }
    }

  private:
    template <class Judge>
    void note(Record& head, std::uint16_t bytes, const Access& access, const Judge& judge) {
        if (head.clock == access.clock && head.actor == access.actor && head.bytes == bytes && head.next_and_flags == access.flags) return;
        Record* place = nullptr;
        const auto stays = [&](Record& record) {
            if (record.clock && record.bytes & bytes && judge(record, bytes) && supersedes(access, bytes, record)) record.clock = 0;
            if (!record.clock && !place) place = &record;
            return record.clock != 0;
        };
        stays(head);
        for (Record* from = &head; const std::uint32_t next = from->next();) {
            Record* const chunk = chunk_at(next);
            bool used = false;
            for (Record* record = chunk; record != chunk + chunk_records; ++record) used |= stays(*record);
            if (used || (place >= chunk && place < chunk + chunk_records)) {
                from = chunk;
            } else {
                from->link(chunk->next());
                chunk->link(free_);
                free_ = next;
            }
        }
        if (!place) {
            const std::uint32_t number = take();
            place = chunk_at(number);
            place->link(head.next());
            head.link(number);
        }
        *place = {access.clock, access.site, place->next() << 8 | access.flags, access.actor, bytes};
    }

    static bool supersedes(const Access& later, std::uint16_t bytes, const Record& record) {
        const std::uint8_t flags = record.flags();
        if (record.bytes & ~bytes || (flags & writes && !(later.flags & writes))) return false;
        if (!(later.flags & atomic)) return true;
        return flags & atomic && (later.flags >> scope_shift & 3) <= (flags >> scope_shift & 3);
    }

    // Records of a chain lie together by eights, two cache lines each: chains of readers are long. The first holds the number of the next eight.
    static constexpr std::uint32_t chunk_records = 8;
    Record* chunk_at(std::uint32_t number) { return pool_ + std::uint64_t(number) * chunk_records; }

    std::uint32_t take() {
        if (free_) {
            const std::uint32_t number = free_;
            free_ = chunk_at(number)->next();
            return number;
        }
        if (++taken_ >> 24) {
            std::fprintf(stderr, "peerlane emulator: more than 2^27 unordered accesses to keep; check a smaller case\n");
            std::exit(1);
        }
        return taken_;
    }

    Record* cells_ = nullptr;
    std::uint16_t* unwritten_ = nullptr;  // by cell, a bit each: bytes that nobody has written
    Record* pool_ = nullptr;
    std::uint32_t taken_ = 0;  // chunks; number 0 is nobody's
    std::uint32_t free_ = 0;
};

}  // namespace peerlane::emulator
