// What C++ that was translated from PTX is written in (see ptx_front_end.py). A register is an unsigned integer of its width; an instruction reads
// it as the type that it names.
#pragma once

#include "cuda.h"

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
