// Reductions other than sums of numeric.cuh's types, as element types: integers of any width, and what is done with an element type's terms.
//
//   Maximum<E>, Minimum<E>   of floats as NCCL's: a NaN counts only where every rank has one
//   Mean<E, W>               the sum by the number of ranks
//   Scaled<E>                the sum times the factor of the launch
//
// Sums of floats are finished in fp32, so all of these round once.
#pragma once

#include <peerlane/peers/numeric.cuh>

namespace peerlane {

// Integers of up to four bytes, which wrap around.
template <class T>
struct Integer {
    using Sum = int;
    static constexpr int lanes = 4 / sizeof(T);
    static constexpr u32 bits = 8 * sizeof(T), mask = 0xffffffffu >> (32 - bits);

    __device__ static void widen(u32 word, int* out) {
#pragma unroll
        for (int lane = 0; lane < lanes; ++lane) out[lane] = static_cast<T>(word >> bits * lane);
    }
    __device__ static u32 narrow(const int* in) {
        u32 word = 0;
#pragma unroll
        for (int lane = 0; lane < lanes; ++lane) word |= (static_cast<u32>(in[lane]) & mask) << bits * lane;
        return word;
    }
    __device__ static int combine(int a, int b) { return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b)); }
};

// They wrap around too. A packet has no room for whole ones: these go round in tiles, whatever their number.
struct Integer64 {
    using Sum = long long;
    static constexpr int lanes = 1, words = 2;

    __device__ static void widen(const u32* from, Sum* out) { out[0] = static_cast<Sum>(from[0] | u64(from[1]) << 32); }
    __device__ static void narrow(const Sum* in, u32* to) { to[0] = static_cast<u32>(in[0]), to[1] = static_cast<u32>(static_cast<u64>(in[0]) >> 32); }
    __device__ static Sum combine(Sum a, Sum b) { return static_cast<Sum>(static_cast<u64>(a) + static_cast<u64>(b)); }
};

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline float smaller(float a, float b) { return fminf(a, b); }
template <class Whole>
__device__ inline Whole larger(Whole a, Whole b) {
    return a > b ? a : b;
}
template <class Whole>
__device__ inline Whole smaller(Whole a, Whole b) {
    return a < b ? a : b;
}

template <class E>
struct Maximum : E {
    __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) { return larger(a, b); }
};

template <class E>
struct Minimum : E {
    __device__ static typename E::Sum combine(typename E::Sum a, typename E::Sum b) { return smaller(a, b); }
};

template <class E, int W>
struct Mean : E {
    __device__ static float finish(float sum, float) { return sum / W; }
};

template <class E>
struct Scaled : E {
    __device__ static float finish(float sum, float factor) { return sum * factor; }
};

}  // namespace peerlane
