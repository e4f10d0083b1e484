// The pieces of one asynchronous operation, while they are put together.
#pragma once

#include <cstdlib>

#include "hooks.h"

// Reads and writes of the emulator's own, which are nobody's accesses.
#define PEERLANE_UNCHECKED __attribute__((no_sanitize("thread"), noinline))

namespace peerlane::emulator {

class Segments {
  public:
    Segments() = default;
    Segments(const Segments&) = delete;
    Segments& operator=(const Segments&) = delete;
    PEERLANE_UNCHECKED ~Segments() { std::free(list_); }

    PEERLANE_UNCHECKED void add(void* target, const void* source, unsigned bytes) {
        if (count_ == room_) {
            room_ = room_ ? 2 * room_ : 256;
            list_ = static_cast<Segment*>(std::realloc(list_, room_ * sizeof(Segment)));
            if (!list_) std::abort();
        }
        list_[count_++] = {target, source, bytes};
    }

    PEERLANE_UNCHECKED const Segment* list() const { return list_; }
    PEERLANE_UNCHECKED unsigned count() const { return count_; }

  private:
    Segment* list_ = nullptr;
    unsigned count_ = 0, room_ = 0;
};

}  // namespace peerlane::emulator
