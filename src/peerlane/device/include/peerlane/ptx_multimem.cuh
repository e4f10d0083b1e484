// Loads, stores and additions on a multicast address: one access that reaches the same place of every rank's memory.
//
// The instructions need an address that maps a multicast object, which nothing in peerlane creates. They are compiled and their PTX is
// checked; they have not been run. The one header with `multimem` in it; multimem.cuh, which uses it, asks `arena.multicast != nullptr`.
#pragma once

#include <peerlane/ptx.cuh>

namespace peerlane {
namespace ptx {

// Sixteen bytes of sums over all ranks, added in fp32.
__device__ inline Vec16 multimem_load_sum_bf16(const void* address) {
    Vec16 sum;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(sum.word[0]), "=r"(sum.word[1]), "=r"(sum.word[2]), "=r"(sum.word[3])
                 : "l"(address)
                 : "memory");
    return sum;
}

__device__ inline Vec16 multimem_load_sum_f16(const void* address) {
    Vec16 sum;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(sum.word[0]), "=r"(sum.word[1]), "=r"(sum.word[2]), "=r"(sum.word[3])
                 : "l"(address)
                 : "memory");
    return sum;
}

__device__ inline Vec16 multimem_load_sum_f32(const void* address) {
    Vec16 sum;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(sum.word[0]), "=r"(sum.word[1]), "=r"(sum.word[2]), "=r"(sum.word[3])
                 : "l"(address)
                 : "memory");
    return sum;
}

// Sixteen bytes to every rank.
__device__ inline void multimem_store(void* address, const Vec16& value) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.word[0]), "r"(value.word[1]),
                 "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}

// A flag to every rank, the caller's included.
__device__ inline void multimem_store_flag(u32* address, u32 value) {
    asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace ptx
}  // namespace peerlane
