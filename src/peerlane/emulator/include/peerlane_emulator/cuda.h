// CUDA's own names for device code that is compiled by g++ for the emulator. Included before the first line of every source.
#pragma once

#include <cstddef>
// libstdc++ would bring the special functions of C++17, half of all that g++ reads for a kernel. GPUs do not have them.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "hooks.h"

// The C library's extras that the GPU's compiler does not have.
#undef M_E
#undef M_LOG2E
#undef M_LOG10E
#undef M_LN2
#undef M_LN10
#undef M_PI
#undef M_PI_2
#undef M_PI_4
#undef M_1_PI
#undef M_2_PI
#undef M_2_SQRTPI
#undef M_SQRT2
#undef M_SQRT1_2

// Everything is inlined into the kernel, so that debug information names the whole chain of calls of an access. The driver finds kernels by
// this spelling.
#define __global__ __attribute__((__flatten__, __noinline__))
#define __device__
#define __host__
#define __forceinline__ PEERLANE_INLINE
#define __noinline__ noinline
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ const
#define __managed__
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// One copy a block: what the compiler takes for a thread is a block (see runtime.cpp).
#define __shared__ thread_local

#define threadIdx (::peerlane::emulator::peerlane_thread_index())
#define blockIdx (::peerlane::emulator::peerlane_block_index())
#define blockDim (::peerlane::emulator::peerlane_block_size())
#define gridDim (::peerlane::emulator::peerlane_grid_size())
constexpr int warpSize = 32;

// ---- vectors ----------------------------------------------------------------------------------------------------------------------------

#define PEERLANE_VECTORS(type, name, align2, align4)                                                            \
    struct name##1 { type x; };                                                                                 \
    struct __align__(align2) name##2 { type x, y; };                                                            \
    struct name##3 { type x, y, z; };                                                                           \
    struct __align__(align4) name##4 { type x, y, z, w; };                                                      \
    constexpr name##1 make_##name##1(type x) { return {x}; }                                                    \
    constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }                                         \
    constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                              \
    constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
PEERLANE_VECTORS(signed char, char, 2, 4)
PEERLANE_VECTORS(unsigned char, uchar, 2, 4)
PEERLANE_VECTORS(short, short, 4, 8)
PEERLANE_VECTORS(unsigned short, ushort, 4, 8)
PEERLANE_VECTORS(int, int, 8, 16)
PEERLANE_VECTORS(unsigned int, uint, 8, 16)
PEERLANE_VECTORS(long long, longlong, 16, 16)
PEERLANE_VECTORS(unsigned long long, ulonglong, 16, 16)
PEERLANE_VECTORS(float, float, 8, 16)
PEERLANE_VECTORS(double, double, 16, 16)
#undef PEERLANE_VECTORS
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// ---- threads of a block -----------------------------------------------------------------------------------------------------------------

namespace peerlane::emulator {

constexpr unsigned whole_warp = 0xffffffffu;

PEERLANE_INLINE unsigned lane() {
    const Uint3 thread = peerlane_thread_index(), size = peerlane_block_size();
    return (thread.x + size.x * (thread.y + size.y * thread.z)) % 32;
}

template <class T>
PEERLANE_INLINE unsigned long long to_bits(T value) {
    static_assert(sizeof(T) <= 8);
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
PEERLANE_INLINE T from_bits(unsigned long long bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class T>
PEERLANE_INLINE T shuffle(unsigned mask, T value, int source) {
    return from_bits<T>(peerlane_warp_exchange(mask, to_bits(value))[source & 31]);
}

// All lanes of the mask that take part, folded in lane order. One that has ended since then counts.
template <class T, class F>
PEERLANE_INLINE T fold(unsigned mask, T value, const F& join) {
    const unsigned long long* values = peerlane_warp_exchange(mask, to_bits(value));
    mask &= static_cast<unsigned>(values[32]);
    T sum{};
    bool first = true;
    for (unsigned i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        sum = first ? from_bits<T>(values[i]) : join(sum, from_bits<T>(values[i]));
        first = false;
    }
    return sum;
}

}  // namespace peerlane::emulator

PEERLANE_INLINE void peerlane_syncthreads(unsigned place) { peerlane::emulator::peerlane_barrier(0, 0, true, place); }
#define __syncthreads() peerlane_syncthreads(__COUNTER__ + 1)
PEERLANE_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { peerlane::emulator::peerlane_warp_barrier(mask); }
PEERLANE_INLINE unsigned __activemask() { return peerlane::emulator::peerlane_active_mask(); }

template <class T>
PEERLANE_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int own = static_cast<int>(peerlane::emulator::lane());
    return peerlane::emulator::shuffle(mask, value, own / width * width + source % width);
}
template <class T>
PEERLANE_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int own = static_cast<int>(peerlane::emulator::lane()), source = own ^ bits;
    return peerlane::emulator::shuffle(mask, value, source / width == own / width ? source : own);
}
template <class T>
PEERLANE_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int own = static_cast<int>(peerlane::emulator::lane()), source = own + static_cast<int>(by);
    return peerlane::emulator::shuffle(mask, value, source / width == own / width ? source : own);
}
template <class T>
PEERLANE_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int own = static_cast<int>(peerlane::emulator::lane()), source = own - static_cast<int>(by);
    return peerlane::emulator::shuffle(mask, value, source >= own / width * width ? source : own);
}
PEERLANE_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned own = peerlane::emulator::lane();
    return peerlane::emulator::fold(mask, predicate ? 1u << own : 0u, [](unsigned a, unsigned b) { return a | b; });
}
PEERLANE_INLINE int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
PEERLANE_INLINE int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
PEERLANE_INLINE T __reduce_add_sync(unsigned mask, T value) {
    return peerlane::emulator::fold(mask, value, [](T a, T b) { return a + b; });
}
template <class T>
PEERLANE_INLINE T __reduce_max_sync(unsigned mask, T value) {
    return peerlane::emulator::fold(mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
PEERLANE_INLINE T __reduce_min_sync(unsigned mask, T value) {
    return peerlane::emulator::fold(mask, value, [](T a, T b) { return a < b ? a : b; });
}

// ---- memory -----------------------------------------------------------------------------------------------------------------------------

PEERLANE_INLINE void __threadfence() { peerlane::emulator::peerlane_fence(peerlane::emulator::gpu_scope); }
PEERLANE_INLINE void __threadfence_system() { peerlane::emulator::peerlane_fence(peerlane::emulator::system_scope, peerlane::emulator::sequential); }
PEERLANE_INLINE void __threadfence_block() { peerlane::emulator::peerlane_fence(peerlane::emulator::block_scope); }

// Relaxed, as CUDA's: without suffix in the scope of the GPU.
#define PEERLANE_ATOMIC(suffix, scope)                                                                                            \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicAdd##suffix(T* p, std::type_identity_t<T> v) {                                                        \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T old) { return static_cast<T>(old + v); });          \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicSub##suffix(T* p, std::type_identity_t<T> v) {                                                        \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T old) { return static_cast<T>(old - v); });          \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicMax##suffix(T* p, std::type_identity_t<T> v) {                                                        \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T old) { return old > v ? old : v; });                \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicMin##suffix(T* p, std::type_identity_t<T> v) {                                                        \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T old) { return old < v ? old : v; });                \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicAnd##suffix(T* p, std::type_identity_t<T> v) {                                                        \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T old) { return old & v; });                          \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicOr##suffix(T* p, std::type_identity_t<T> v) {                                                         \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T old) { return old | v; });                          \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicExch##suffix(T* p, std::type_identity_t<T> v) {                                                       \
        return peerlane::emulator::update(p, peerlane::emulator::scope, [v](T) { return v; });                                    \
    }                                                                                                                             \
    template <class T>                                                                                                            \
    PEERLANE_INLINE T atomicCAS##suffix(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> v) {                       \
        return peerlane::emulator::compare_exchange(p, compare, v, peerlane::emulator::scope);                                    \
    }
PEERLANE_ATOMIC(, gpu_scope)
PEERLANE_ATOMIC(_system, system_scope)
PEERLANE_ATOMIC(_block, block_scope)
#undef PEERLANE_ATOMIC

template <class T>
PEERLANE_INLINE T __ldcg(const T* p) { return *p; }
template <class T>
PEERLANE_INLINE T __ldcs(const T* p) { return *p; }
template <class T>
PEERLANE_INLINE T __ldg(const T* p) {
    peerlane::emulator::peerlane_read_only(p, sizeof(T));
    return *p;
}
template <class T>
PEERLANE_INLINE void __stcg(T* p, std::type_identity_t<T> v) { *p = v; }
template <class T>
PEERLANE_INLINE void __stcs(T* p, std::type_identity_t<T> v) { *p = v; }
PEERLANE_INLINE std::size_t __cvta_generic_to_shared(const void* p) { return peerlane::emulator::peerlane_shared_address(p); }
PEERLANE_INLINE void* __cvta_shared_to_generic(std::size_t address) {
    return peerlane::emulator::peerlane_shared_pointer(static_cast<unsigned>(address));
}

// ---- time and control -------------------------------------------------------------------------------------------------------------------

PEERLANE_INLINE long long clock64() { return static_cast<long long>(peerlane::emulator::peerlane_time()); }
PEERLANE_INLINE void __nanosleep(unsigned) { peerlane::emulator::peerlane_pause(); }
[[noreturn]] PEERLANE_INLINE void __trap() { peerlane::emulator::peerlane_trap(); }

// ---- numbers ----------------------------------------------------------------------------------------------------------------------------

#define PEERLANE_CAST(name, from, to) \
    PEERLANE_INLINE to name(from value) { return __builtin_bit_cast(to, value); }
PEERLANE_CAST(__uint_as_float, unsigned, float)
PEERLANE_CAST(__float_as_uint, float, unsigned)
PEERLANE_CAST(__int_as_float, int, float)
PEERLANE_CAST(__float_as_int, float, int)
PEERLANE_CAST(__longlong_as_double, long long, double)
PEERLANE_CAST(__double_as_longlong, double, long long)
#undef PEERLANE_CAST
PEERLANE_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
PEERLANE_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
PEERLANE_INLINE int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
PEERLANE_INLINE int __ffs(int v) { return __builtin_ffs(v); }
PEERLANE_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
PEERLANE_INLINE int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
PEERLANE_INLINE unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32); }
PEERLANE_INLINE int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
PEERLANE_INLINE float __expf(float v) { return expf(v); }
PEERLANE_INLINE float __logf(float v) { return logf(v); }
PEERLANE_INLINE float rsqrtf(float v) { return 1.0f / sqrtf(v); }
PEERLANE_INLINE float __fdividef(float a, float b) { return a / b; }
PEERLANE_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
PEERLANE_INLINE float __fadd_rn(float a, float b) { return a + b; }
PEERLANE_INLINE float __fmul_rn(float a, float b) { return a * b; }
PEERLANE_INLINE float __fsub_rn(float a, float b) { return a - b; }
PEERLANE_INLINE float __fdiv_rn(float a, float b) { return a / b; }
PEERLANE_INLINE float __fsqrt_rn(float v) { return sqrtf(v); }
PEERLANE_INLINE float __frcp_rn(float v) { return 1.0f / v; }
PEERLANE_INLINE float __saturatef(float v) { return v > 0 ? (v < 1 ? v : 1.0f) : 0.0f; }
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
