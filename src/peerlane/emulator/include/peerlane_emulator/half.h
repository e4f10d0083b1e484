// Floats of sixteen and eight bits on the CPU, and what asynchronous copies do at their target. Used by device headers and the runtime.
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

inline float widen_e4m3(unsigned bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float magnitude = exponent == 15 && fraction == 7 ? __builtin_nanf("")
                            : exponent                      ? __builtin_ldexpf(static_cast<float>(8 + fraction), exponent - 10)
                                                            : __builtin_ldexpf(static_cast<float>(fraction), -9);
    return bits & 0x80 ? -magnitude : magnitude;
}

// To nearest even; what is too large becomes the largest number, NaN stays NaN.
template <int fraction_bits, int bias, int largest>
inline unsigned narrow_float8(float value) {
    const unsigned sign = __builtin_signbit(value) ? 0x80 : 0;
    if (value != value) return 0x7f;
    if (value == 0) return sign;
    const float magnitude = __builtin_fminf(__builtin_fabsf(value), static_cast<float>(largest));
    int exponent = 0;
    __builtin_frexpf(magnitude, &exponent);  // magnitude is 0.5 to 1 times 2^exponent
    const int power = (exponent - 1 < 1 - bias ? 1 - bias : exponent - 1) - fraction_bits;
    const auto steps = static_cast<unsigned>(__builtin_rintf(__builtin_ldexpf(magnitude, -power)));
    // `steps` holds the leading one for normal numbers, which adds one to the exponent field; a carry out of it does too.
    return sign | (static_cast<unsigned>(power + fraction_bits + bias - 1) << fraction_bits) + steps;
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
