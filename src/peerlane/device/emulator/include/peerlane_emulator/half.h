// Sixteen-bit floats on the CPU, and what asynchronous copies do at their target. Plain C++: device headers use the conversions too.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "hooks.h"

namespace peerlane::emulator {

inline float widen_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t(bits) << 16); }

// To nearest even; every NaN becomes the same one, as on the GPU.
inline std::uint16_t narrow_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (value != value) return 0x7fff;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float widen_f16(std::uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline std::uint16_t narrow_f16(float value) {
    return value != value ? std::uint16_t(0x7fff) : std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}

template <class T, class Add>
inline void add_each(void* target, const char* data, unsigned bytes, const Add& add) {
    for (unsigned i = 0; i < bytes; i += sizeof(T)) {
        T there, term;
        std::memcpy(&there, static_cast<char*>(target) + i, sizeof(T));
        std::memcpy(&term, data + i, sizeof(T));
        there = add(there, term);
        std::memcpy(static_cast<char*>(target) + i, &there, sizeof(T));
    }
}

inline void combine(Combine how, void* target, const char* data, unsigned bytes) {
    switch (how) {
        case Combine::replace: std::memcpy(target, data, bytes); break;
        case Combine::add_f32: add_each<float>(target, data, bytes, [](float a, float b) { return a + b; }); break;
        case Combine::add_u32: add_each<std::uint32_t>(target, data, bytes, [](std::uint32_t a, std::uint32_t b) { return a + b; }); break;
        case Combine::add_f16:
            add_each<std::uint16_t>(target, data, bytes, [](auto a, auto b) { return narrow_f16(widen_f16(a) + widen_f16(b)); });
            break;
        case Combine::add_bf16:
            add_each<std::uint16_t>(target, data, bytes, [](auto a, auto b) { return narrow_bf16(widen_bf16(a) + widen_bf16(b)); });
            break;
    }
}

}  // namespace peerlane::emulator
