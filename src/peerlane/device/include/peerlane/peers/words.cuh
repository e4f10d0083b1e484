// Ranges of bytes of any address and length: as words in registers, and copied by a team. Loops over single bytes are kept rolled: they are
// for the ends of ranges and for odd addresses, and would make up most of the code.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {

// Items [first, end).
struct Part {
    u64 first, end;
};

// Part `index` of `parts` of `count` items; the last ones may be shorter or empty.
__device__ inline Part part_of(u64 count, u32 index, u32 parts) {
    const u64 length = (count + parts - 1) / parts;
    const u64 first = index * length;
    return {first < count ? first : count, first + length < count ? first + length : count};
}

template <class T>
__device__ inline bool aligned_for(const void* address) {
    return reinterpret_cast<u64>(address) % sizeof(T) == 0;
}

// The words as one number, shifted down by a byte; `byte` comes in at the top.
template <int words>
__device__ inline void shift_in(u32 (&value)[words], u8 byte) {
#pragma unroll
    for (int w = 0; w < words; ++w) value[w] = value[w] >> 8 | (w + 1 < words ? value[w + 1 < words ? w + 1 : w] : u32{byte}) << 24;
}

// Words by vectors: their address is a multiple of 16.
template <int words>
__device__ inline void load_vectors(const char* source, u32 (&value)[words]) {
#pragma unroll
    for (int v = 0; v < words / 4; ++v) {
        const Vec16 whole = reinterpret_cast<const Vec16*>(source)[v];
#pragma unroll
        for (int w = 0; w < 4; ++w) value[4 * v + w] = whole.word[w];
    }
}
template <int words>
__device__ inline void store_vectors(char* target, const u32 (&value)[words]) {
#pragma unroll
    for (int v = 0; v < words / 4; ++v) {
        reinterpret_cast<Vec16*>(target)[v] = Vec16{{value[4 * v], value[4 * v + 1], value[4 * v + 2], value[4 * v + 3]}};
    }
}

// `words` words of 32 bits at `offset` of a buffer of `bytes`; what lies behind the end reads as zero.
template <int words>
__device__ inline void load_words(const char* buffer, u64 offset, u64 bytes, u32 (&value)[words]) {
    const char* source = buffer + offset;
    if (offset + 4 * words <= bytes) {
        if constexpr (words % 4 == 0) {
            if (aligned_for<Vec16>(source)) return load_vectors(source, value);
        }
        if constexpr (words == 2) {
            if (aligned_for<u64>(source)) {
                const u64 whole = *reinterpret_cast<const u64*>(source);
                value[0] = static_cast<u32>(whole), value[1] = static_cast<u32>(whole >> 32);
                return;
            }
        }
        if (aligned_for<u32>(source)) {
#pragma unroll
            for (int w = 0; w < words; ++w) value[w] = *reinterpret_cast<const u32*>(source + 4 * w);
            return;
        }
    }
#pragma unroll 1
    for (int b = 0; b < 4 * words; ++b) shift_in(value, offset + b < bytes ? static_cast<u8>(source[b]) : u8{0});
}

// The reverse; nothing is written behind the end.
template <int words>
__device__ inline void store_words(char* buffer, u64 offset, u64 bytes, const u32 (&value)[words]) {
    char* target = buffer + offset;
    if (offset + 4 * words <= bytes) {
        if constexpr (words % 4 == 0) {
            if (aligned_for<Vec16>(target)) return store_vectors(target, value);
        }
        if constexpr (words == 2) {
            if (aligned_for<u64>(target)) {
                *reinterpret_cast<u64*>(target) = value[0] | u64(value[1]) << 32;
                return;
            }
        }
        if (aligned_for<u32>(target)) {
#pragma unroll
            for (int w = 0; w < words; ++w) *reinterpret_cast<u32*>(target + 4 * w) = value[w];
            return;
        }
    }
    u32 rest[words];
#pragma unroll
    for (int w = 0; w < words; ++w) rest[w] = value[w];
#pragma unroll 1
    for (int b = 0; b < 4 * words && offset + b < bytes; ++b) {
        target[b] = static_cast<char>(rest[0]);
        shift_in(rest, u8{0});
    }
}

// All of T that fit into `bytes`, several in flight per thread; returns how many bytes that were.
template <class T, class Team>
__device__ inline u64 copy_as(const Team& team, char* target, const char* source, u64 bytes) {
    constexpr int in_flight = 4;
    const u64 count = bytes / sizeof(T);
    const T* from = reinterpret_cast<const T*>(source);
    T* to = reinterpret_cast<T*>(target);
    u64 first = team.thread();
    for (; first + (in_flight - 1) * team.size() < count; first += in_flight * team.size()) {
        T value[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; ++k) value[k] = from[first + k * team.size()];
#pragma unroll
        for (int k = 0; k < in_flight; ++k) to[first + k * team.size()] = value[k];
    }
    for (; first < count; first += team.size()) to[first] = from[first];
    return count * sizeof(T);
}

// A copy by all threads of a team, with the widest access that both addresses allow. Ranges do not overlap.
template <class Team>
__device__ inline void copy_bytes(const Team& team, char* target, const char* source, u64 bytes) {
    const u64 both = reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source);
    u64 done = 0;
    if (both % sizeof(Vec16) == 0) {
        done = copy_as<Vec16>(team, target, source, bytes);
    } else if (both % sizeof(u32) == 0) {
        done = copy_as<u32>(team, target, source, bytes);
    } else if (both % sizeof(u16) == 0) {
        done = copy_as<u16>(team, target, source, bytes);
    }
    copy_as<u8>(team, target + done, source + done, bytes - done);
}

}  // namespace peerlane
