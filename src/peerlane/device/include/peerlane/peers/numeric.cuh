// Element types as they lie in 32-bit words, and sums of them.
//
// An element type E has `lanes` (elements per word), `Sum` (what sums are kept in: float, for integers the integer),
// `widen(word, Sum*)` and `narrow(const Sum*)`, which rounds to nearest even. It may have more; collectives/reductions.cuh uses all of this:
// `words` (of an element that takes two; widen reads and narrow writes as many), `combine(Sum, Sum)` in the place of a sum, and `finish(Sum,
// float)`, which makes a result of all ranks' sum and the factor of the launch.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u), not_a_number = __builtin_bit_cast(float, 0x7fc00000u);

struct BFloat16 {
    using Sum = float;
    static constexpr int lanes = 2;
    __device__ static void widen(u32 word, float* out) {
        out[0] = __uint_as_float(word << 16);
        out[1] = __uint_as_float(word & 0xffff0000u);
    }
    __device__ static u32 narrow(const float* in) { return ptx::pack_bf16x2(in[0], in[1]); }
};

struct Float16 {
    using Sum = float;
    static constexpr int lanes = 2;
    __device__ static void widen(u32 word, float* out) { ptx::unpack_f16x2(word, out[0], out[1]); }
    __device__ static u32 narrow(const float* in) { return ptx::pack_f16x2(in[0], in[1]); }
};

struct Float32 {
    using Sum = float;
    static constexpr int lanes = 1;
    __device__ static void widen(u32 word, float* out) { out[0] = __uint_as_float(word); }
    __device__ static u32 narrow(const float* in) { return __float_as_uint(in[0]); }
};

// Wraps around.
struct Int32 {
    using Sum = u32;
    static constexpr int lanes = 1;
    __device__ static void widen(u32 word, u32* out) { out[0] = word; }
    __device__ static u32 narrow(const u32* in) { return in[0]; }
};

// value / divisor from 1 / divisor: the same bits where none of the terms is subnormal or infinite, in three operations and without a branch.
__device__ inline float quotient(float value, float divisor, float inverse) {
    const float near = value * inverse;
    return fmaf(-fmaf(near, divisor, -value), inverse, near);
}

// 8-bit floats; sums too large for the type become its largest number, NaN stays NaN.
struct Float8E4M3 {
    using Sum = float;
    static constexpr int lanes = 4;
    __device__ static void widen(u32 word, float* out) {
        ptx::unpack_f16x2(ptx::unpack_e4m3x2(static_cast<u16>(word)), out[0], out[1]);
        ptx::unpack_f16x2(ptx::unpack_e4m3x2(static_cast<u16>(word >> 16)), out[2], out[3]);
    }
    __device__ static u32 narrow(const float* in) { return ptx::pack_e4m3x2(in[0], in[1]) | u32(ptx::pack_e4m3x2(in[2], in[3])) << 16; }
};

struct Float8E5M2 {
    using Sum = float;
    static constexpr int lanes = 4;
    __device__ static void widen(u32 word, float* out) {
        ptx::unpack_f16x2(ptx::unpack_e5m2x2(static_cast<u16>(word)), out[0], out[1]);
        ptx::unpack_f16x2(ptx::unpack_e5m2x2(static_cast<u16>(word >> 16)), out[2], out[3]);
    }
    __device__ static u32 narrow(const float* in) { return ptx::pack_e5m2x2(in[0], in[1]) | u32(ptx::pack_e5m2x2(in[2], in[3])) << 16; }
};

template <class E>
constexpr int words_of_element() {
    if constexpr (requires { E::words; }) return E::words;
    else return 1;
}

// The sum of some `words` 32-bit words of E, added one source at a time.
template <class E, int words>
struct Accumulator {
    using Sum = typename E::Sum;
    static constexpr int step = words_of_element<E>(), lanes = E::lanes, sums = words / step * lanes;
    static_assert(words % step == 0, "an element lies in two places");
    Sum sum[sums];

    __device__ void set(const u32* source) {
#pragma unroll
        for (int w = 0; w < words; w += step) widen(source + w, sum + w / step * lanes);
    }
    __device__ void add(const u32* source) {
#pragma unroll
        for (int w = 0; w < words; w += step) {
            Sum term[lanes];
            widen(source + w, term);
#pragma unroll
            for (int lane = 0; lane < lanes; ++lane) {
                Sum& own = sum[w / step * lanes + lane];
                if constexpr (requires { E::combine(own, term[lane]); }) own = E::combine(own, term[lane]);
                else own += term[lane];
            }
        }
    }
    __device__ void finish(float factor) {
        if constexpr (requires { E::finish(sum[0], factor); }) {
#pragma unroll
            for (int i = 0; i < sums; ++i) sum[i] = E::finish(sum[i], factor);
        }
    }
    __device__ void round(u32* target) const {
#pragma unroll
        for (int w = 0; w < words; w += step) {
            if constexpr (step == 1) target[w] = E::narrow(sum + w * lanes);
            else E::narrow(sum + w / step * lanes, target + w);
        }
    }

  private:
    __device__ static void widen(const u32* source, Sum* out) {
        if constexpr (step == 1) E::widen(source[0], out);
        else E::widen(source, out);
    }
};

// The sum of all ranks' terms in rank order, so that the same bits come out wherever it is done. The caller's term is `own`; element
// `rank` of `terms` is not read.
template <class E, int W, int words>
__device__ inline void sum_in_rank_order(
    u32 rank, const u32 (&own)[words], const u32 (&terms)[W][words], u32 (&result)[words], float factor = 1.0f) {
    Accumulator<E, words> total;
#pragma unroll
    for (int q = 0; q < W; ++q) {
        u32 term[words];
#pragma unroll
        for (int w = 0; w < words; ++w) term[w] = q == rank ? own[w] : terms[q][w];
        if (q == 0) {
            total.set(term);
        } else {
            total.add(term);
        }
    }
    total.finish(factor);
    total.round(result);
}

}  // namespace peerlane
