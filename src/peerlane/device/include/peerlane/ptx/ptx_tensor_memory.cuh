// The matrix units of compute capability 10.0 and their own memory, one instruction per function. Needs sm_100a.
//
// Tensor memory has 128 lanes of 512 columns of 32 bits. An address is lane << 16 | column. Warp w of a block reads lanes 32 (w % 4) to 32 (w % 4) + 31.
// A product of 64 rows leaves row 16 w + i in lane 32 w + i, i < 16: every warp of a warpgroup finds 16 rows, the ones that it has of a wgmma.
#pragma once

#include <peerlane/ptx/mma.cuh>

namespace peerlane {
namespace ptx {

// `columns` (a power of two, 32 to 512) for the caller's block, by a warp; the address goes to `*address`, in shared memory. Waits until they are free.
template <u32 columns>
__device__ inline void tensor_memory_take(u32* address) {
    static_assert(columns >= 32 && columns <= 512 && (columns & (columns - 1)) == 0);
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(address)), "n"(columns) : "memory");
}

// Gives them back, by a warp.
template <u32 columns>
__device__ inline void tensor_memory_give_back(u32 address) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(columns) : "memory");
}

// Ends a barrier, whose memory may have another use then.
__device__ inline void mbarrier_invalidate(u64* barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Order what threads did at a barrier's one side before what the matrix units do at the other.
__device__ inline void tensor_memory_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ inline void tensor_memory_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// What a product is, in 32 bits: sums in fp32, 16-bit operands of `type`, their majors, 64 rows and N columns.
template <MmaType type, int N, Major a_major, Major b_major>
constexpr u32 mma_instruction() {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256);
    constexpr u32 sums = 1, operands = type == MmaType::bf16 ? 1 : 0, rows = 64;
    return sums << 4 | operands << 7 | operands << 10 | static_cast<u32>(a_major == Major::mn) << 15 | static_cast<u32>(b_major == Major::mn) << 16 |
           static_cast<u32>(N / 8) << 17 | rows / 16 << 24;
}

// The shared-memory operand, as mma_descriptor says it for a wgmma.
__device__ inline u64 tensor_memory_descriptor(u64 wgmma_descriptor) {
    constexpr u64 version = 1, swizzle_128_bytes = 2;
    return (wgmma_descriptor & 0x3fffffffffffull) | version << 46 | swizzle_128_bytes << 61;
}

// D (64 x N, from `sum` on) = A (64 x 16) B (16 x N), or added to D; `add` 0 starts a new sum. By one thread; runs beside the threads.
__device__ inline void tensor_memory_mma(u32 sum, u64 a, u64 b, u32 instruction, u32 add) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %4, 0;\n\ttcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(sum), "l"(a),
                 "l"(b), "r"(instruction), "r"(add)
                 : "memory");
}

// One arrival at an mbarrier of this block when all products so far of this thread are done and have read their operands.
__device__ inline void tensor_memory_commit(u64* barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// 16 lanes by 16 columns, from `address` on, to value[0] to value[7] of each thread, as accumulators of mma.cuh. By a warp; the values are there behind
// tensor_memory_wait_load, and wgmma_hold keeps the compiler from using them before it.
__device__ inline void tensor_memory_load(float* value, u32 address) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3]), "=f"(value[4]), "=f"(value[5]), "=f"(value[6]), "=f"(value[7])
                 : "r"(address)
                 : "memory");
}

// Until this thread's loads are there.
__device__ inline void tensor_memory_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

}  // namespace ptx
}  // namespace peerlane
