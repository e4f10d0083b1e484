// What C++ that was translated from PTX is written in (see ptx_front_end.py). A register is an unsigned integer of its width; an instruction reads
// it as the type that it names.
#pragma once

#include "cuda.h"

#include <cstdio>
#include <cstring>

namespace peerlane::emulator::ptx_code {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using u128 = unsigned __int128;
using s8 = signed char;
using s16 = short;
using s32 = int;
using s64 = long long;
using f32 = float;
using f64 = double;

// The low bytes of a value as a T; zeros above where it is narrower.
template <class T, class S>
PEERLANE_INLINE T as(const S& value) {
    if constexpr (sizeof(T) == sizeof(S)) {
        return __builtin_bit_cast(T, value);
    } else {
        T result{};
        __builtin_memcpy(&result, &value, sizeof(T) < sizeof(S) ? sizeof(T) : sizeof(S));
        return result;
    }
}

// A result into a register, which may be wider: then it is extended as its type says.
template <class D, class V>
PEERLANE_INLINE void set(D& target, const V& value) {
    if constexpr (sizeof(D) > sizeof(V) && (std::is_integral_v<V> || sizeof(V) == 16)) {
        target = static_cast<D>(static_cast<typename std::conditional_t<std::is_signed_v<V>, std::type_identity<s64>, std::type_identity<D>>::type>(value));
    } else {
        target = as<D>(value);
    }
}
PEERLANE_INLINE void set(bool& target, bool value) { target = value; }
struct Sink {};
template <class V>
PEERLANE_INLINE void set(const Sink&, const V&) {}

template <class T, int n>
struct alignas(sizeof(T) * n) Vector {
    T at[n];
};

using emulator::load;
using emulator::store;
// PTX promises vectors element by element only; on GPUs, eight bytes arrive together.
template <class T, int n>
PEERLANE_INLINE Vector<T, n> load(const Vector<T, n>* address, Scope scope, Order order = relaxed) {
    Vector<T, n> value;
    if constexpr (sizeof value == 16) peerlane_load_halves(address, &value, scope, order);
    else peerlane_load(address, &value, sizeof value, scope, order);
    return value;
}
template <class T, int n>
PEERLANE_INLINE void store(Vector<T, n>* address, const Vector<T, n>& value, Scope scope, Order order = relaxed) {
    if constexpr (sizeof value == 16) peerlane_store_halves(address, &value, scope, order);
    else peerlane_store(address, &value, sizeof value, scope, order);
}
// An ordinary store. To memory of the thread itself it is one of C++.
template <class T>
PEERLANE_INLINE void put(T* address, const T& value) { peerlane_put(address, &value, sizeof(T)); }

PEERLANE_INLINE char* shared(u32 address) { return static_cast<char*>(peerlane_shared_pointer(address)); }
PEERLANE_INLINE char* generic(u64 address) { return reinterpret_cast<char*>(address); }

// ---- arithmetic

template <class T>
PEERLANE_INLINE T high(T a, T b) {
    if constexpr (sizeof(T) == 8) {
        using Wide = std::conditional_t<std::is_signed_v<T>, __int128, u128>;
        return static_cast<T>(static_cast<u128>(Wide(a) * Wide(b)) >> 64);
    } else {
        using Wide = std::conditional_t<std::is_signed_v<T>, s64, u64>;
        return static_cast<T>(Wide(a) * Wide(b) >> (8 * sizeof(T)));
    }
}
// Integers wrap around, as unsigned ones do.
template <class T, class F>
PEERLANE_INLINE T wrapped(T a, T b, const F& f) {
    if constexpr (std::is_floating_point_v<T>) {
        return f(a, b);
    } else {
        using U = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<U>(f(static_cast<u64>(static_cast<U>(a)), static_cast<u64>(static_cast<U>(b)))));
    }
}
template <class T>
PEERLANE_INLINE T add(T a, T b) { return wrapped(a, b, [](auto x, auto y) { return x + y; }); }
template <class T>
PEERLANE_INLINE T sub(T a, T b) { return wrapped(a, b, [](auto x, auto y) { return x - y; }); }
template <class T>
PEERLANE_INLINE T mul(T a, T b) { return wrapped(a, b, [](auto x, auto y) { return x * y; }); }
// A sum or difference and the bit that it carries or borrows, with the one of the operation before.
template <bool subtract, class T>
PEERLANE_INLINE T with_carry(T a, T b, bool before, bool& carry) {
    using U = std::make_unsigned_t<T>;
    const u128 left = U(a), right = static_cast<u128>(U(b)) + before;
    carry = subtract ? left < right : left + right > U(~U(0));
    return static_cast<T>(subtract ? left - right : left + right);
}
// By zero: all ones, as a GPU has it.
template <class T>
PEERLANE_INLINE T div(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a / b;
    else return b == 0 ? static_cast<T>(-1) : std::is_signed_v<T> && b == static_cast<T>(-1) ? sub<T>(0, a) : static_cast<T>(a / b);
}
template <class T>
PEERLANE_INLINE T rem(T a, T b) { return b == 0 ? a : std::is_signed_v<T> && b == static_cast<T>(-1) ? T(0) : static_cast<T>(a % b); }
template <class T>
PEERLANE_INLINE T least(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
    else return b < a ? b : a;
}
template <class T>
PEERLANE_INLINE T greatest(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
    else return a < b ? b : a;
}
struct least_of {
    float operator()(float a, float b) const { return std::fmin(a, b); }
};
struct greatest_of {
    float operator()(float a, float b) const { return std::fmax(a, b); }
};
template <class F>
PEERLANE_INLINE float or_nan(float a, float b) { return a != a || b != b ? __builtin_nanf("") : F{}(a, b); }
template <class T>
PEERLANE_INLINE T shift_left(T a, u32 by) { return by >= 8 * sizeof(T) ? T(0) : static_cast<T>(a << by); }
template <class T>
PEERLANE_INLINE T shift_right(T a, u32 by) {
    return by >= 8 * sizeof(T) ? (std::is_signed_v<T> && a < 0 ? T(-1) : T(0)) : static_cast<T>(a >> by);
}
PEERLANE_INLINE float flushed(float a) { return std::fabs(a) < 1.17549435e-38f ? std::copysign(0.0f, a) : a; }
PEERLANE_INLINE float saturated(float a) { return a != a ? 0.0f : a < 0 ? 0.0f : a > 1 ? 1.0f : a; }
// Rounded down, up and to zero: the sum in double, which is off by less than any step that matters, then a step back where it went too far.
PEERLANE_INLINE float rounded(double exact, int how) {
    const float near = static_cast<float>(exact);
    if (near != near || std::isinf(near) || how == 0) return near;
    const bool above = static_cast<double>(near) > exact, below = static_cast<double>(near) < exact;
    if (above && (how < 0 || (how == 2 && exact > 0))) return std::nextafterf(near, -__builtin_inff());
    if (below && (how == 1 || (how == 2 && exact < 0))) return std::nextafterf(near, __builtin_inff());
    return near;
}
template <class T, class F>
PEERLANE_INLINE T to_integer(F value, int how) {  // 0 nearest even, -1 down, 1 up, 2 to zero
    if (value != value) return T(0);
    const double whole = how == 0 ? std::nearbyint(double(value)) : how < 0 ? std::floor(double(value)) : how == 1 ? std::ceil(double(value)) : std::trunc(double(value));
    if (whole <= static_cast<double>(std::is_signed_v<T> ? T(1) << (8 * sizeof(T) - 1) : T(0))) return std::is_signed_v<T> ? static_cast<T>(T(1) << (8 * sizeof(T) - 1)) : T(0);
    if (whole >= std::ldexp(1.0, 8 * sizeof(T) - (std::is_signed_v<T> ? 1 : 0))) return static_cast<T>(std::is_signed_v<T> ? ~(T(1) << (8 * sizeof(T) - 1)) : ~T(0));
    return static_cast<T>(whole);
}
// Floats of eight bits, of which PTX converts two at a time.
PEERLANE_INLINE u32 narrow_e4m3x2(float value) { return narrow_float8<3, 7, 448>(value); }
PEERLANE_INLINE u32 narrow_e5m2x2(float value) { return narrow_float8<2, 15, 57344>(value); }
PEERLANE_INLINE u32 widened_e4m3x2(u16 pair) { return narrow_f16(widen_e4m3(pair & 255)) | u32(narrow_f16(widen_e4m3(pair >> 8))) << 16; }
PEERLANE_INLINE u32 widened_e5m2x2(u16 pair) { return u32(pair & 255) << 8 | u32(pair >> 8) << 24; }
PEERLANE_INLINE u32 permuted(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 choice = selector >> 4 * i & 15, byte = bytes >> 8 * (choice & 7) & 255;
        result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}
PEERLANE_INLINE u32 looked_up(u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}
template <class T>
PEERLANE_INLINE T field(T a, u32 at, u32 bits) {
    using U = std::make_unsigned_t<T>;
    constexpr u32 width = 8 * sizeof(T);
    at &= 255, bits &= 255;
    const u32 last = at + bits - 1 < width - 1 ? at + bits - 1 : width - 1;
    const bool sign = std::is_signed_v<T> && bits && static_cast<U>(a) >> last & 1;
    U result = at < width ? static_cast<U>(a) >> at : 0;
    if (bits < width) {
        const U mask = bits ? (U(1) << bits) - 1 : 0;
        result = (result & mask) | (sign ? ~mask : 0);
    }
    return static_cast<T>(result);
}
template <class T>
PEERLANE_INLINE T inserted(T a, T b, u32 at, u32 bits) {
    constexpr u32 width = 8 * sizeof(T);
    at &= 255, bits &= 255;
    if (at >= width || bits == 0) return b;
    const T mask = (bits >= width ? ~T(0) : (T(1) << bits) - 1) << at;
    return (b & ~mask) | ((a << at) & mask);
}
template <class T>
PEERLANE_INLINE T reversed(T a) {
    T result = 0;
    for (u32 i = 0; i < 8 * sizeof(T); ++i) result = static_cast<T>(result << 1 | (a >> i & 1));
    return result;
}

// ---- floats of sixteen bits, one or two to a register

// To odd: what is rounded once more to fewer bits comes out as if it had been rounded once.
PEERLANE_INLINE float rounded_to_odd(double exact) {
    const float near = rounded(exact, 2);
    return near == exact || near != near || std::isinf(near) ? near : __builtin_bit_cast(float, __builtin_bit_cast(u32, near) | 1);
}
struct F16 {
    static float widen(u16 bits) { return widen_f16(bits); }
    static u16 narrow(double value) { return narrow_f16(rounded_to_odd(value)); }
};
struct Bf16 {
    static float widen(u16 bits) { return widen_bf16(bits); }
    static u16 narrow(double value) { return narrow_bf16(rounded_to_odd(value)); }
};
template <class Half, class R, class F, class... Operands>
PEERLANE_INLINE R of_halves(const F& f, Operands... operands) {
    if constexpr (sizeof(R) == 2) {
        return Half::narrow(f(double(Half::widen(operands))...));
    } else {
        const u32 low = Half::narrow(f(double(Half::widen(u16(operands)))...)), high = Half::narrow(f(double(Half::widen(u16(operands >> 16)))...));
        return low | high << 16;
    }
}

// Rounded towards a side: what was rounded to the nearest steps back where it went too far.
template <class Half>
PEERLANE_INLINE u16 narrowed(double exact, int how) {
    const u16 near = Half::narrow(exact);
    const double got = Half::widen(near);
    if (how == 0 || exact != exact || std::isinf(exact) || got == exact) return near;
    const bool down = got > exact && (how < 0 || (how == 2 && exact > 0)), up = got < exact && (how == 1 || (how == 2 && exact < 0));
    if (!down && !up) return near;
    if ((near & 0x7fff) == 0) return down ? 0x8001 : 1;
    return (near >> 15 != 0) == down ? near + 1 : near - 1;
}
// An integer that is rounded once more to fewer bits comes out as if it had been rounded once.
template <class T>
PEERLANE_INLINE double to_odd(T value) {
    const double near = static_cast<double>(value);
    if constexpr (std::is_integral_v<T> && sizeof(T) == 8) {
        const __int128 exact = value, got = static_cast<__int128>(near);
        if (got == exact) return near;
        const double lower = (got > exact) == (exact > 0) ? std::nextafter(near, 0.0) : near;
        return __builtin_bit_cast(double, __builtin_bit_cast(u64, lower) | 1);
    }
    return near;
}
template <class Half, class R, class F>
PEERLANE_INLINE R compared(const F& f, R a, R b, u32 yes) {
    const u32 low = f(Half::widen(u16(a)), Half::widen(u16(b))) ? yes & 0xffff : 0;
    if constexpr (sizeof(R) == 2) return R(low);
    else return low | (f(Half::widen(u16(a >> 16)), Half::widen(u16(b >> 16))) ? yes << 16 : 0);
}

// ---- small integers, several to a register

template <class T, class F>
PEERLANE_INLINE u32 of_shorts(const F& f, u32 a, u32 b) {
    return u32(u16(f(T(a), T(b)))) | u32(u16(f(T(a >> 16), T(b >> 16)))) << 16;
}
template <class A, class B>
PEERLANE_INLINE u32 dot(u32 a, u32 b, u32 sum) {
    for (u32 i = 0; i < 4 / sizeof(A); ++i) sum += u32(s32(A(a >> 8 * sizeof(A) * i)) * s32(B(b >> 8 * i)));
    return sum;
}
PEERLANE_INLINE u32 byte_differences(u32 a, u32 b) {
    u32 result = 0;
    for (u32 i = 0; i < 32; i += 8) result |= u32(std::abs(s32(a >> i & 255) - s32(b >> i & 255))) << i;
    return result;
}
template <class T>
PEERLANE_INLINE u32 highest_bit(T value, bool as_shift) {
    const u64 bits = std::is_signed_v<T> && value < 0 ? u64(std::make_unsigned_t<T>(~value)) : u64(std::make_unsigned_t<T>(value));
    if (bits == 0) return ~0u;
    const u32 at = 63 - __builtin_clzll(bits);
    return as_shift ? 8 * sizeof(T) - 1 - at : at;
}
PEERLANE_INLINE u32 nth_set(u32 mask, u32 base, s32 nth) {
    if (nth == 0) return mask >> (base & 31) & 1 ? base : ~0u;
    u32 left = u32(nth < 0 ? -nth : nth) - 1;
    for (s32 at = s32(base); at >= 0 && at < 32; at += nth < 0 ? -1 : 1) {
        if (mask >> at & 1 && left-- == 0) return u32(at);
    }
    return ~0u;
}
// Sums and products of floats are rounded towards a side by what the nearest one leaves over, which is exact.
PEERLANE_INLINE float rounded_by(double near, double left, int how) {
    const float result = rounded(near, how);
    if (left == 0 || std::isinf(result) || static_cast<double>(result) != near) return result;
    if (left < 0 && (how < 0 || (how == 2 && near > 0))) return std::nextafterf(result, -__builtin_inff());
    if (left > 0 && (how == 1 || (how == 2 && near < 0))) return std::nextafterf(result, __builtin_inff());
    return result;
}
PEERLANE_INLINE float add_rounded(float a, float b, int how) {
    const double near = double(a) + double(b), part = near - double(a);
    return rounded_by(near, (double(a) - (near - part)) + (double(b) - part), how);
}
PEERLANE_INLINE float sub_rounded(float a, float b, int how) { return add_rounded(a, -b, how); }
PEERLANE_INLINE float mul_rounded(float a, float b, int how) { return rounded(double(a) * double(b), how); }

// ---- calls

// A parameter or result of a function.
template <int n>
struct alignas(n < 16 ? (n & (n - 1) ? 8 : n) : 16) Bytes {
    unsigned char at[n];
};
// printf, whose arguments lie one behind the other, each aligned to its size. It is no access of device code.
__attribute__((noinline, no_sanitize("thread"))) inline Bytes<4> printed(Bytes<8> format, Bytes<8> arguments) {
    const char* text = as<const char*>(format);
    u64 at = as<u64>(arguments);
    s32 count = 0;
    while (*text) {
        char one[32] = {*text++};
        if (one[0] != '%') {
            count += std::printf("%s", one);
            continue;
        }
        u32 length = 1;
        while (*text && length < 30 && !std::strchr("diouxXeEfFgGaAcsp%", *text)) one[length++] = *text++;
        const char kind = one[length++] = *text ? *text++ : 0;
        const bool floats = std::strchr("eEfFgGaA", kind), wide = floats || kind == 's' || kind == 'p' || std::strchr(one, 'l');
        u64 value = 0;
        if (kind != '%') {
            const u32 size = wide ? 8 : 4;
            at = (at + size - 1) / size * size;
            std::memcpy(&value, reinterpret_cast<const void*>(at), size);
            at += size;
        }
        count += floats ? std::printf(one, as<double>(value)) : wide ? std::printf(one, value) : std::printf(one, u32(value));
    }
    return as<Bytes<4>>(count);
}

// ---- warps

enum class Shuffle { up, down, bfly, idx };
template <Shuffle how>
PEERLANE_INLINE u32 shuffled(u32 value, u32 b, u32 c, u32 mask, bool& inside) {
    const u32 own = lane(), clamp = c & 31, segment = c >> 8 & 31;
    const u32 last = (own & segment) | (clamp & ~segment), first = own & segment;
    b &= 31;
    u32 source = how == Shuffle::up ? own - b : how == Shuffle::down ? own + b : how == Shuffle::bfly ? own ^ b : first | (b & ~segment);
    inside = how == Shuffle::up ? static_cast<int>(source) >= static_cast<int>(last) : source <= last;
    if (!inside) source = own;
    return static_cast<u32>(peerlane_warp_exchange(mask, value)[source & 31]);
}
PEERLANE_INLINE u32 ballot(u32 mask, bool predicate, u32& voters) {
    const unsigned long long* values = peerlane_warp_exchange(mask, predicate);
    voters = mask & static_cast<u32>(values[32]);
    u32 votes = 0;
    for (u32 i = 0; i < 32; ++i) votes |= (voters >> i & 1 && values[i] ? 1u : 0u) << i;
    return votes;
}
// The lanes that have the value of the caller; of `all`: the mask if all have one, else 0.
template <bool all, class T>
PEERLANE_INLINE u32 matched(u32 mask, T value) {
    const unsigned long long* values = peerlane_warp_exchange(mask, value);
    const u32 there = mask & static_cast<u32>(values[32]);
    u32 same = 0;
    for (u32 i = 0; i < 32; ++i) same |= (there >> i & 1 && values[i] == value ? 1u : 0u) << i;
    return all && same != there ? 0 : same;
}
// The thread's number in its block.
PEERLANE_INLINE u32 first_lane() {
    const Uint3 thread = peerlane_thread_index(), size = peerlane_block_size();
    return thread.x + size.x * (thread.y + size.y * thread.z);
}

// cp.async: `read` bytes come from the source, the rest is zero.
PEERLANE_INLINE void copy_by_thread(char* target, const char* source, u32 bytes, u32 read) {
    const u32 known = read < bytes ? read : bytes;
    const Segment pieces[2] = {{target, source, known}, {target + known, nullptr, bytes - known}};
    peerlane_async(known ? pieces : pieces + 1, known && known < bytes ? 2 : 1, Combine::replace, nullptr, thread_queue);
}

}  // namespace peerlane::emulator::ptx_code
