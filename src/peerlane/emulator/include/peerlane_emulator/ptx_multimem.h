// Instructions on multicast addresses: each is one access to every rank's memory, element by element, in the order of the ranks.
#pragma once

#include "ptx_code.h"

namespace peerlane::emulator::ptx_code {

// Where all ranks have what a multicast address stands for.
struct Parts {
    void* at[multicast_ranks];
    u32 count;
};
PEERLANE_INLINE void find_parts(Parts& parts, char* address, u32 bytes) { parts.count = peerlane_multicast(address, bytes, parts.at); }

// Whether an access is an ordinary one, or of an order and scope.
struct Access {
    bool ordinary;
    Scope scope;
    Order order;
};

// An element of all ranks, joined by `join`; sums of a wider type are narrowed once, at the end.
template <class T, class Widen, class Join, class Narrow>
PEERLANE_INLINE T joined(const Parts& parts, u32 index, Access access, const Widen& widen, const Join& join, const Narrow& narrow) {
    const auto read = [&](u32 rank) __attribute__((always_inline)) {
        const T* at = static_cast<const T*>(parts.at[rank]) + index;
        return widen(access.ordinary ? *at : load(at, access.scope, access.order));
    };
    auto sum = read(0);
    for (u32 rank = 1; rank < parts.count; ++rank) sum = join(sum, read(rank));
    return narrow(sum);
}
template <class T>
PEERLANE_INLINE void store_on_all(const Parts& parts, u32 index, Access access, T value) {
    for (u32 rank = 0; rank < parts.count; ++rank) {
        T* at = static_cast<T*>(parts.at[rank]) + index;
        if (access.ordinary) *at = value;
        else store(at, value, access.scope, access.order);
    }
}
template <class T, class Join>
PEERLANE_INLINE void update_on_all(const Parts& parts, u32 index, Access access, T value, const Join& join) {
    for (u32 rank = 0; rank < parts.count; ++rank) {
        update(static_cast<T*>(parts.at[rank]) + index, access.scope, [&](T old) { return join(old, value); }, access.order);
    }
}

// One or two halves as floats, in which they are added.
struct Floats {
    float low, high;
};
PEERLANE_INLINE Floats add_floats(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
template <class Half, class T>
PEERLANE_INLINE Floats widened(T value) {
    if constexpr (sizeof(T) == 2) return {Half::widen(value), 0.0f};
    else return {Half::widen(u16(value)), Half::widen(u16(value >> 16))};
}
template <class Half, class T>
PEERLANE_INLINE T narrowed(Floats value) {
    if constexpr (sizeof(T) == 2) return Half::narrow(value.low);
    else return u32(Half::narrow(value.low)) | u32(Half::narrow(value.high)) << 16;
}

}  // namespace peerlane::emulator::ptx_code
