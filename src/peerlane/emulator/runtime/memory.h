// The memory of all ranks: buffers at addresses that the host chose, with gaps between them, restored before every schedule.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "../include/peerlane_emulator/half.h"

namespace peerlane::emulator {

constexpr std::uint64_t page_bytes = 4096;
constexpr std::uint64_t cell_bytes = 16;

// Bytes that lie at `begin` before a schedule; whole pages, or the end of a buffer.
struct Content {
    std::uint64_t begin = 0, bytes = 0;
    const char* data = nullptr;
};

// Some bytes and who may use them. Offsets count from the start of the memory. A buffer begins at a page of its own.
struct Buffer {
    std::uint64_t begin = 0, end = 0;
    int rank = -1;   // only this rank's threads, or -1
    int block = -1;  // only this block's threads (shared memory), or -1
    const char* expected = nullptr;  // what must lie here after a schedule
    std::vector<std::uint64_t> multicast{};  // offsets of the memory on each rank that this stands for, if it is a multicast address
    bool unwritten = false;  // nobody has written it before
    std::uint32_t number = 0;  // bytes of the floating-point numbers here, 18 for bf16, 1 if they may be any; 0: others
};

class Memory {
  public:
    // Maps everything. Where there is no content there are zeros.
    void map(std::uint64_t base, std::vector<Buffer> buffers, const std::vector<Content>& contents) {
        buffers_ = std::move(buffers);
        for (const Buffer& buffer : buffers_) bytes_ = std::max(bytes_, buffer.end);
        bytes_ = (bytes_ + 2 * page_bytes) / page_bytes * page_bytes;
        base_ = reinterpret_cast<char*>(base);
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
        if (reserve(base_, bytes_, MAP_FIXED_NOREPLACE) != base_) fail("the address range of the ranks' memory is taken");
        owner_ = reinterpret_cast<std::uint16_t*>(reserve(nullptr, bytes_ / page_bytes * sizeof(std::uint16_t), 0));
        dirty_ = reinterpret_cast<std::uint8_t*>(reserve(nullptr, bytes_ / page_bytes, 0));
        for (const Content& content : contents) {
            for (std::uint64_t done = 0; done < content.bytes; done += page_bytes) {
                const std::uint64_t begin = content.begin + done;
                initial_[begin / page_bytes] = {begin, std::min(page_bytes, content.bytes - done), content.data + done};
                restore(begin / page_bytes);
            }
        }
        for (std::size_t i = 1; i < buffers_.size(); ++i) {
            for (std::uint64_t page = buffers_[i].begin / page_bytes; page * page_bytes < buffers_[i].end; ++page) owner_[page] = i;
        }
    }

    static char* reserve(void* where, std::uint64_t bytes, int flags) {
        void* mapped = mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
        if (mapped == MAP_FAILED) fail("no address space");
        return static_cast<char*>(mapped);
    }

    std::uint64_t offset(const void* address) const { return static_cast<const char*>(address) - base_; }
    bool holds(std::uint64_t offset) const { return offset < bytes_; }
    char* address(std::uint64_t offset) const { return base_ + offset; }
    std::uint64_t bytes() const { return bytes_; }
    const std::vector<Buffer>& buffers() const { return buffers_; }

    // The number of the buffer at `offset`, 0 for none. Buffer 0 is empty.
    std::uint32_t number_at(std::uint64_t offset) const { return owner_[offset / page_bytes]; }

    void written(std::uint64_t offset, std::uint32_t bytes) {
        for (std::uint64_t page = offset / page_bytes; page <= (offset + bytes - 1) / page_bytes; ++page) {
            if (!dirty_[page]) {
                dirty_[page] = 1;
                dirty_pages_.push_back(page);
            }
        }
    }

    void restore() {
        for (const std::uint64_t page : dirty_pages_) {
            dirty_[page] = 0;
            restore(page);
        }
        dirty_pages_.clear();
    }

    // Pages that the last schedule has written.
    const std::vector<std::uint64_t>& dirty_pages() const { return dirty_pages_; }

    // Offset of the first byte of a buffer that differs from what was expected; its end if none does. `rounded`: floating-point numbers may
    // be the same sums in another order.
    std::uint64_t first_difference(const Buffer& buffer, bool rounded) const {
        const char* found = base_ + buffer.begin;
        const std::uint64_t size = buffer.end - buffer.begin;
        if (!buffer.expected || std::memcmp(found, buffer.expected, size) == 0) return buffer.end;
        const std::uint32_t kind = buffer.number == 1 ? likely_kind(buffer, size) : buffer.number;
        if (rounded && kind) return first_other_number(buffer, kind, size);
        return buffer.begin + (std::mismatch(found, found + size, buffer.expected).first - found);
    }

  private:
    static double largest_number(const Buffer& buffer, std::uint32_t kind, std::uint64_t size) {
        double largest = 0;
        for (std::uint64_t i = 0, width = kind % 16; i + width <= size; i += width) {
            const double value = std::fabs(number(buffer.expected + i, kind));
            if (std::isfinite(value)) largest = std::max(largest, value);
        }
        return largest;
    }
    // Beside the largest number, what is of another type is tiny.
    static bool tiny(double value, double largest) { return value != 0 && std::fabs(value) < std::ldexp(largest, -48); }
    // What numbers these are: the first kind of which the largest is not tiny, nor most others beside it. Every bit pattern is a usual fp16.
    static std::uint32_t likely_kind(const Buffer& buffer, std::uint64_t size) {
        for (const std::uint32_t kind : {18, 4, 8, 2}) {
            const double largest = largest_number(buffer, kind, size);
            std::int64_t more = 0;
            for (std::uint64_t i = 0, width = kind % 16; i + width <= size; i += width) {
                if (const double value = number(buffer.expected + i, kind); value != 0) more += tiny(value, largest) ? -1 : 1;
            }
            if (more >= 0 && largest >= std::ldexp(1, kind == 2 ? -14 : -64)) return kind;
        }
        return 0;
    }
    // How many terms a sum had, and how large they were, is not known: a small part of the largest number counts as rounding.
    std::uint64_t first_other_number(const Buffer& buffer, std::uint32_t kind, std::uint64_t size) const {
        const char* found = base_ + buffer.begin;
        const std::uint64_t width = kind % 16;
        const double largest = largest_number(buffer, kind, size);
        const double rounding = std::ldexp(largest, kind == 18 ? -5 : kind == 2 ? -8 : kind == 4 ? -12 : -40);
        for (std::uint64_t i = 0; i + width <= size; i += width) {
            if (std::memcmp(found + i, buffer.expected + i, width) == 0) continue;
            const double value = number(found + i, kind), expected = number(buffer.expected + i, kind);
            const bool other = buffer.number == 1 && (tiny(value, largest) || tiny(expected, largest));
            if (other || !(std::fabs(value - expected) <= rounding)) return buffer.begin + i;
        }
        return buffer.end;
    }
    static double number(const char* at, std::uint32_t kind) {
        double wide;
        float narrow;
        unsigned short half;
        std::memcpy(&wide, at, kind == 8 ? 8 : 0), std::memcpy(&narrow, at, kind == 4 ? 4 : 0), std::memcpy(&half, at, kind == 2 || kind == 18 ? 2 : 0);
        return kind == 8 ? wide : kind == 4 ? narrow : kind == 2 ? widen_f16(half) : widen_bf16(half);
    }
    void restore(std::uint64_t page) {
        const auto found = initial_.find(page);
        const Content content = found == initial_.end() ? Content{} : found->second;
        if (content.bytes < page_bytes) std::memset(base_ + page * page_bytes, 0, page_bytes);
        if (content.bytes) std::memcpy(base_ + content.begin, content.data, content.bytes);
    }
    [[noreturn]] static void fail(const char* what) {
        std::fprintf(stderr, "peerlane emulator: %s: ", what);
        std::perror("mmap");
        std::exit(1);
    }

    char* base_ = nullptr;
    std::uint64_t bytes_ = 0;
    std::vector<Buffer> buffers_;
    std::uint16_t* owner_ = nullptr;  // by page; most of the memory may be gaps
    std::uint8_t* dirty_ = nullptr;   // by page
    std::unordered_map<std::uint64_t, Content> initial_;  // by page
    std::vector<std::uint64_t> dirty_pages_;
};

}  // namespace peerlane::emulator
