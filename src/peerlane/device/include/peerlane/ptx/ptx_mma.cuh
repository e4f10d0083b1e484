// The matrix units, one instruction per function: wgmma with its descriptors and fences, register reallocation, and the warp-wide mma.sync with
// the loads and stores of its fragments.
//
// mma.cuh says how fragments and descriptors are laid out. Needs sm_90a for wgmma and setmaxnreg, sm_90 for the rest.
#pragma once

#include <peerlane/ptx/mma.cuh>

namespace peerlane {
namespace ptx {

// ---- registers of a warpgroup: to be called by all its warps ---------------------------------------------------------------------------

// Gives registers of each thread back to the block's pool, down to `count` (a multiple of 8, 24 to 256).
template <int count>
__device__ inline void registers_decrease() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// Takes registers from the block's pool, up to `count`; waits until they are there.
template <int count>
__device__ inline void registers_increase() {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- wgmma: D (64 x N) = A (64 x 16) B (16 x N), or added to D ---------------------------------------------------------------------------
//
// Of e4m3 32 k: as many bytes. The units keep about 14 bits of such a sum while they add to it.
// Runs beside the threads: D may be touched, and shared memory written, only after wgmma_wait. What threads wrote to shared memory must be
// behind fence_proxy_async_shared.

// Before the first wgmma, and whenever registers of D or A were written otherwise since the last.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the wgmmas so far.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `pending` of the newest groups are under way.
template <int pending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses of D across a wait: registers are not memory to it.
template <int count>
__device__ inline void wgmma_hold(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Widths that there are.
template <int N>
constexpr bool mma_columns = N == 32 || N == 64 || N == 96 || N == 128 || N == 160 || N == 176 || N == 256;

#define PEERLANE_NAMES_16 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PEERLANE_NAMES_32 \
    PEERLANE_NAMES_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PEERLANE_NAMES_48 \
    PEERLANE_NAMES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PEERLANE_NAMES_64 \
    PEERLANE_NAMES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PEERLANE_NAMES_80 \
    PEERLANE_NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define PEERLANE_NAMES_88 \
    PEERLANE_NAMES_80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PEERLANE_NAMES_128 \
    PEERLANE_NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define PEERLANE_HOLD_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PEERLANE_HOLD_16(i) PEERLANE_HOLD_4(i), PEERLANE_HOLD_4(i + 4), PEERLANE_HOLD_4(i + 8), PEERLANE_HOLD_4(i + 12)
#define PEERLANE_HOLD_32(i) PEERLANE_HOLD_16(i), PEERLANE_HOLD_16(i + 16)
#define PEERLANE_HOLD_48(i) PEERLANE_HOLD_32(i), PEERLANE_HOLD_16(i + 32)
#define PEERLANE_HOLD_64(i) PEERLANE_HOLD_32(i), PEERLANE_HOLD_32(i + 32)
#define PEERLANE_HOLD_80(i) PEERLANE_HOLD_64(i), PEERLANE_HOLD_16(i + 64)
#define PEERLANE_HOLD_88(i) PEERLANE_HOLD_80(i), PEERLANE_HOLD_4(i + 80), PEERLANE_HOLD_4(i + 84)
#define PEERLANE_HOLD_128(i) PEERLANE_HOLD_64(i), PEERLANE_HOLD_64(i + 64)

// D has `count` registers; the operands after it are numbered %count, %count + 1, ...: spelled out as o0, o1, ...
#define PEERLANE_WGMMA_SHARED(n, type, count, o0, o1, o2, o3, o4)                                                       \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" o2 ", 0;\n\t"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" PEERLANE_NAMES_##count "}, %" o0 \
                 ", %" o1 ", p, 1, 1, %" o3 ", %" o4 ";\n\t}"                                                           \
                 : PEERLANE_HOLD_##count(0)                                                                             \
                 : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)))

// Operands of 8 bits lie along k, so there is nothing to transpose.
#define PEERLANE_WGMMA_BYTES(n, type, count, o0, o1, o2)                                                                \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" o2 ", 0;\n\t"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." #type "." #type " {" PEERLANE_NAMES_##count "}, %" o0 \
                 ", %" o1 ", p, 1, 1;\n\t}"                                                                             \
                 : PEERLANE_HOLD_##count(0)                                                                             \
                 : "l"(a), "l"(b), "r"(add))

#define PEERLANE_WGMMA_REGISTERS(n, type, count, o0, o1, o2, o3, o4, o5, o6)                                            \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" o5 ", 0;\n\t"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" PEERLANE_NAMES_##count "}, {%" o0 \
                 ", %" o1 ", %" o2 ", %" o3 "}, %" o4 ", p, 1, 1, %" o6 ";\n\t}"                                        \
                 : PEERLANE_HOLD_##count(0)                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(static_cast<int>(b_major)))

#define PEERLANE_WGMMA_SHARED_ANY(type)                                                              \
    if constexpr (N == 32) PEERLANE_WGMMA_SHARED(32, type, 16, "16", "17", "18", "19", "20");        \
    if constexpr (N == 64) PEERLANE_WGMMA_SHARED(64, type, 32, "32", "33", "34", "35", "36");        \
    if constexpr (N == 96) PEERLANE_WGMMA_SHARED(96, type, 48, "48", "49", "50", "51", "52");        \
    if constexpr (N == 128) PEERLANE_WGMMA_SHARED(128, type, 64, "64", "65", "66", "67", "68");      \
    if constexpr (N == 160) PEERLANE_WGMMA_SHARED(160, type, 80, "80", "81", "82", "83", "84");      \
    if constexpr (N == 176) PEERLANE_WGMMA_SHARED(176, type, 88, "88", "89", "90", "91", "92");      \
    if constexpr (N == 256) PEERLANE_WGMMA_SHARED(256, type, 128, "128", "129", "130", "131", "132")

#define PEERLANE_WGMMA_REGISTERS_ANY(type)                                                                            \
    if constexpr (N == 32) PEERLANE_WGMMA_REGISTERS(32, type, 16, "16", "17", "18", "19", "20", "21", "22");          \
    if constexpr (N == 64) PEERLANE_WGMMA_REGISTERS(64, type, 32, "32", "33", "34", "35", "36", "37", "38");          \
    if constexpr (N == 96) PEERLANE_WGMMA_REGISTERS(96, type, 48, "48", "49", "50", "51", "52", "53", "54");          \
    if constexpr (N == 128) PEERLANE_WGMMA_REGISTERS(128, type, 64, "64", "65", "66", "67", "68", "69", "70");        \
    if constexpr (N == 160) PEERLANE_WGMMA_REGISTERS(160, type, 80, "80", "81", "82", "83", "84", "85", "86");        \
    if constexpr (N == 176) PEERLANE_WGMMA_REGISTERS(176, type, 88, "88", "89", "90", "91", "92", "93", "94");        \
    if constexpr (N == 256) PEERLANE_WGMMA_REGISTERS(256, type, 128, "128", "129", "130", "131", "132", "133", "134")

#define PEERLANE_WGMMA_BYTES_ANY(type)                                           \
    if constexpr (N == 32) PEERLANE_WGMMA_BYTES(32, type, 16, "16", "17", "18");   \
    if constexpr (N == 64) PEERLANE_WGMMA_BYTES(64, type, 32, "32", "33", "34");   \
    if constexpr (N == 96) PEERLANE_WGMMA_BYTES(96, type, 48, "48", "49", "50");   \
    if constexpr (N == 128) PEERLANE_WGMMA_BYTES(128, type, 64, "64", "65", "66"); \
    if constexpr (N == 160) PEERLANE_WGMMA_BYTES(160, type, 80, "80", "81", "82"); \
    if constexpr (N == 176) PEERLANE_WGMMA_BYTES(176, type, 88, "88", "89", "90"); \
    if constexpr (N == 256) PEERLANE_WGMMA_BYTES(256, type, 128, "128", "129", "130")

// A and B in shared memory, by mma_descriptor. `add` 0 starts a new sum.
template <MmaType type, int N, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[N / 2], u64 a, u64 b, u32 add) {
    static_assert(mma_columns<N>);
    static_assert(type != MmaType::e4m3 || (a_major == Major::k && b_major == Major::k), "operands of 8 bits are contiguous along k");
    if constexpr (type == MmaType::e4m3) {
        PEERLANE_WGMMA_BYTES_ANY(e4m3);
    } else if constexpr (type == MmaType::bf16) {
        PEERLANE_WGMMA_SHARED_ANY(bf16);
    } else {
        PEERLANE_WGMMA_SHARED_ANY(f16);
    }
}

// A in registers, in the fragment given at the top.
template <MmaType type, int N, Major b_major>
__device__ inline void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, u32 add) {
    static_assert(mma_columns<N> && type != MmaType::e4m3);
    if constexpr (type == MmaType::bf16) {
        PEERLANE_WGMMA_REGISTERS_ANY(bf16);
    } else {
        PEERLANE_WGMMA_REGISTERS_ANY(f16);
    }
}

#undef PEERLANE_NAMES_16
#undef PEERLANE_NAMES_32
#undef PEERLANE_NAMES_64
#undef PEERLANE_NAMES_88
#undef PEERLANE_NAMES_80
#undef PEERLANE_NAMES_48
#undef PEERLANE_NAMES_128
#undef PEERLANE_HOLD_4
#undef PEERLANE_HOLD_16
#undef PEERLANE_HOLD_32
#undef PEERLANE_HOLD_64
#undef PEERLANE_HOLD_88
#undef PEERLANE_HOLD_80
#undef PEERLANE_HOLD_48
#undef PEERLANE_HOLD_128
#undef PEERLANE_WGMMA_SHARED
#undef PEERLANE_WGMMA_BYTES
#undef PEERLANE_WGMMA_BYTES_ANY
#undef PEERLANE_WGMMA_REGISTERS
#undef PEERLANE_WGMMA_SHARED_ANY
#undef PEERLANE_WGMMA_REGISTERS_ANY

// ---- mma.sync: D (16 x 8) += A (16 x 16) B (16 x 8), by one warp, all fragments in registers ---------------------------------------------

template <MmaType type>
__device__ inline void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (type == MmaType::bf16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// ---- fragments of four 8 x 8 matrices of 16-bit elements from and to shared memory --------------------------------------------------------
//
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned). Word i of lane l is row l / 4, columns 2 (l % 4) + {0, 1} of
// matrix i.

__device__ inline void load_matrices(u32 (&word)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void store_matrices(void* row, const u32 (&word)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

// The same, but word i of lane l is rows 2 (l % 4) + {0, 1}, column l / 4 of matrix i.

__device__ inline void load_matrices_transposed(u32 (&word)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void store_matrices_transposed(void* row, const u32 (&word)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

}  // namespace ptx
}  // namespace peerlane
