// The memory of all ranks: buffers at addresses that the host chose, with gaps between them, restored before every schedule.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

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
    bool any_order = false;  // what is expected may depend on the order of atomic accesses
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

    // Offset of the first byte of a buffer that differs from what was expected; its end if none does.
    std::uint64_t first_difference(const Buffer& buffer) const {
        const char* found = base_ + buffer.begin;
        const std::uint64_t size = buffer.end - buffer.begin;
        if (!buffer.expected || std::memcmp(found, buffer.expected, size) == 0) return buffer.end;
        return buffer.begin + (std::mismatch(found, found + size, buffer.expected).first - found);
    }

  private:
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
