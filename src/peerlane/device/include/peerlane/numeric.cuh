// Element types as they lie in 32-bit words, and sums of them in fp32.
//
// An element type E has `lanes` (elements per word), `widen(word, float*)` and `narrow(const float*)`, which rounds to nearest even.
#pragma once

#include <peerlane/ptx.cuh>

namespace peerlane {

struct BFloat16 {
    static constexpr int lanes = 2;
    __device__ static void widen(u32 word, float* out) {
        out[0] = __uint_as_float(word << 16);
        out[1] = __uint_as_float(word & 0xffff0000u);
    }
    __device__ static u32 narrow(const float* in) { return ptx::pack_bf16x2(in[0], in[1]); }
};

struct Float16 {
    static constexpr int lanes = 2;
    __device__ static void widen(u32 word, float* out) { ptx::unpack_f16x2(word, out[0], out[1]); }
    __device__ static u32 narrow(const float* in) { return ptx::pack_f16x2(in[0], in[1]); }
};

struct Float32 {
    static constexpr int lanes = 1;
    __device__ static void widen(u32 word, float* out) { out[0] = __uint_as_float(word); }
    __device__ static u32 narrow(const float* in) { return __float_as_uint(in[0]); }
};

// The sum of some `words` 32-bit words of E, added one source at a time in fp32.
template <class E, int words>
struct Accumulator {
    float sum[words * E::lanes];

    __device__ void set(const u32* source) {
#pragma unroll
        for (int w = 0; w < words; ++w) E::widen(source[w], sum + w * E::lanes);
    }
    __device__ void add(const u32* source) {
#pragma unroll
        for (int w = 0; w < words; ++w) {
            float term[E::lanes];
            E::widen(source[w], term);
#pragma unroll
            for (int lane = 0; lane < E::lanes; ++lane) sum[w * E::lanes + lane] += term[lane];
        }
    }
    __device__ void round(u32* target) const {
#pragma unroll
        for (int w = 0; w < words; ++w) target[w] = E::narrow(sum + w * E::lanes);
    }
};

}  // namespace peerlane
