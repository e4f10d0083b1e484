// One PTX instruction (or one idiom of two) per function; nothing here knows about ranks or protocols.
//
// The lowest layer of the kit, in three headers: ptx.cuh (clocks, memory order, conversions), ptx_async.cuh (mbarriers and bulk copies) and
// whatever a matrix unit needs beside them. Everything above it is plain C++ and is also compiled for the CPU by the emulator, which has
// headers of the same names in front of these on its search path: hence <peerlane/...> in every include, and no inline assembly elsewhere.
//
// Headers of peerlane include no toolkit header, so NVRTC compiles them in tens of milliseconds and needs no include path but this one.
#pragma once

namespace peerlane {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Sixteen bytes, the widest access that is one indivisible memory operation.
struct alignas(16) Vec16 {
    u32 word[4];
};

namespace ptx {

// ---- clocks and control ----------------------------------------------------------------------------------------------------------------

// Nanoseconds of a clock that all SMs of a GPU share; it advances in steps of up to a microsecond.
__device__ inline u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ inline void sleep(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

[[noreturn]] __device__ inline void trap() {
    asm volatile("trap;");
    __builtin_unreachable();
}

// True in one thread of a converged warp, the same one every time.
__device__ inline bool elect_one() {
    u32 elected;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
    return elected != 0;
}

// A value that is the same in all lanes of a converged warp, so that the compiler knows it.
__device__ inline u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

// Those of the lanes `among` whose `value` has the same bit as the caller's; for all lanes of a warp. Half the instructions of a ballot and a choice.
__device__ inline u32 lanes_alike(u32 among, u32 value, u32 bit) {
    asm volatile(
        "{\n\t.reg .pred set;\n\t.reg .b32 own, lanes;\n\tand.b32 own, %1, %2;\n\tsetp.ne.u32 set, own, 0;\n\t"
        "vote.sync.ballot.b32 lanes, set, 0xffffffff;\n\t@!set not.b32 lanes, lanes;\n\tand.b32 %0, %0, lanes;\n\t}"
        : "+r"(among)
        : "r"(value), "r"(bit));
    return among;
}

// A barrier among `threads` threads (a multiple of 32) of the block; number 0 is __syncthreads's. `arrive` does not wait.
__device__ inline void barrier_sync(u32 number, u32 threads) { asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
__device__ inline void barrier_arrive(u32 number, u32 threads) { asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// The block's dynamic shared memory, aligned for every use (a swizzled tile needs 1024 bytes). The one place where it is declared: every
// kernel starts from here, so that names and alignments can not differ between two headers of one kernel.
__device__ inline char* dynamic_shared() {
    extern __shared__ __align__(1024) char peerlane_dynamic_shared[];
    return peerlane_dynamic_shared;
}

// ---- fences ----------------------------------------------------------------------------------------------------------------------------

// Release and acquire in one, for the threads of every GPU and the host.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The same for the threads of this GPU.
__device__ inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Orders ordinary accesses and those of the asynchronous proxy (bulk copies, TMA, wgmma) to the same memory, in both directions.
__device__ inline void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900  // before, there are no asynchronous copies to order
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// The same for shared memory alone.
__device__ inline void fence_proxy_async_shared() {
#if __CUDA_ARCH__ >= 900  // before, there are no asynchronous copies to order
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- accesses with an order and a scope ------------------------------------------------------------------------------------------------
//
// relaxed: atomic, orders nothing; pair it with a fence. acquire: behind it, what came before the release is seen; costs far less than a fence,
// which waits for the thread's own accesses too. system: all GPUs and the host; gpu: this GPU; block: this block.

#define PEERLANE_LOAD(name, type, letter, instruction)                                                   \
    __device__ inline type name(const type* address) {                                                   \
        type value;                                                                                      \
        asm volatile(instruction " %0, [%1];" : "=" letter(value) : "l"(address) : "memory");            \
        return value;                                                                                    \
    }
#define PEERLANE_STORE(name, instruction)                                                                \
    __device__ inline void name(u32* address, u32 value) {                                               \
        asm volatile(instruction " [%0], %1;" ::"l"(address), "r"(value) : "memory");                    \
    }
// Returns the value before.
#define PEERLANE_UPDATE(name, instruction)                                                               \
    __device__ inline u32 name(u32* address, u32 value) {                                                \
        u32 before;                                                                                      \
        asm volatile(instruction " %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory"); \
        return before;                                                                                   \
    }

PEERLANE_LOAD(load_relaxed_system, u32, "r", "ld.relaxed.sys.global.u32")
PEERLANE_LOAD(load_relaxed_system, u64, "l", "ld.relaxed.sys.global.u64")
PEERLANE_LOAD(load_acquire_system, u32, "r", "ld.acquire.sys.global.u32")
PEERLANE_LOAD(load_relaxed_gpu, u32, "r", "ld.relaxed.gpu.global.u32")
PEERLANE_LOAD(load_acquire_gpu, u32, "r", "ld.acquire.gpu.global.u32")
PEERLANE_STORE(store_relaxed_system, "st.relaxed.sys.global.u32")
PEERLANE_STORE(store_relaxed_gpu, "st.relaxed.gpu.global.u32")
PEERLANE_UPDATE(add_relaxed_gpu, "atom.relaxed.gpu.global.add.u32")
PEERLANE_UPDATE(add_relaxed_system, "atom.relaxed.sys.global.add.u32")
PEERLANE_UPDATE(exchange_relaxed_system, "atom.relaxed.sys.global.exch.b32")

// Of shared memory, for threads of one block.
PEERLANE_LOAD(load_relaxed_block, u32, "r", "ld.relaxed.cta.u32")
PEERLANE_STORE(store_release_block, "st.release.cta.u32")

// Four floats, each for itself, in no fixed order.
__device__ inline void add_floats_relaxed_gpu(float* address, const Vec16& value) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(__uint_as_float(value.word[0])),
                 "f"(__uint_as_float(value.word[1])), "f"(__uint_as_float(value.word[2])), "f"(__uint_as_float(value.word[3]))
                 : "memory");
}

// A 128-bit scalar: never torn, unlike a vector of four words. Volatile, which means relaxed at system scope: ptxas (13.0) makes two loads of one
// word each of a predicated ld.relaxed.b128 if only two of its words are used, and then a packet's flag can be newer than its data.
__device__ inline Vec16 load_relaxed_system(const Vec16* address) {
    Vec16 value;
    asm volatile(
        "{\n\t.reg .b128 whole;\n\t.reg .b64 low, high;\n\t"
        "ld.volatile.global.b128 whole, [%4];\n\t"
        "mov.b128 {low, high}, whole;\n\t"
        "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
        : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
        : "l"(address)
        : "memory");
    return value;
}

__device__ inline void store_relaxed_system(Vec16* address, const Vec16& value) {
    asm volatile(
        "{\n\t.reg .b128 whole;\n\t.reg .b64 low, high;\n\t"
        "mov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\t"
        "mov.b128 whole, {low, high};\n\t"
        "st.relaxed.sys.global.b128 [%0], whole;\n\t}" ::"l"(address),
        "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
        : "memory");
}

// ---- conversions -----------------------------------------------------------------------------------------------------------------------

#define PEERLANE_PACK(name, result, letter, instruction)                                                 \
    __device__ inline result name(float low, float high) {                                               \
        result packed;                                                                                   \
        asm(instruction " %0, %2, %1;" : "=" letter(packed) : "f"(low), "f"(high));                      \
        return packed;                                                                                   \
    }
#define PEERLANE_FUNCTION(name, result, result_letter, given, letter, instruction)                       \
    __device__ inline result name(given x) {                                                             \
        result y;                                                                                        \
        asm(instruction " %0, %1;" : "=" result_letter(y) : letter(x));                                  \
        return y;                                                                                        \
    }

// Two floats to two 16-bit floats in one word, `low` in the low half, rounded to nearest even.
PEERLANE_PACK(pack_bf16x2, u32, "r", "cvt.rn.bf16x2.f32")
PEERLANE_PACK(pack_f16x2, u32, "r", "cvt.rn.f16x2.f32")

__device__ inline void unpack_f16x2(u32 word, float& low, float& high) {
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}" : "=f"(low), "=f"(high) : "r"(word));
}

// Two 8-bit floats (`low` in the low byte) to two halves in one word, exactly; and back from floats, rounded to nearest even, with what is
// too large made the largest number of the type. NaN stays NaN.
PEERLANE_FUNCTION(unpack_e4m3x2, u32, "r", u16, "h", "cvt.rn.f16x2.e4m3x2")
PEERLANE_FUNCTION(unpack_e5m2x2, u32, "r", u16, "h", "cvt.rn.f16x2.e5m2x2")
PEERLANE_PACK(pack_e4m3x2, u16, "h", "cvt.rn.satfinite.e4m3x2.f32")
PEERLANE_PACK(pack_e5m2x2, u16, "h", "cvt.rn.satfinite.e5m2x2.f32")

// ---- functions of the special unit: relative errors of about 2^-22; powers and inputs below the normal numbers count as zero ---------------

PEERLANE_FUNCTION(exp2, float, "f", float, "f", "ex2.approx.ftz.f32")
PEERLANE_FUNCTION(log2, float, "f", float, "f", "lg2.approx.ftz.f32")
PEERLANE_FUNCTION(reciprocal, float, "f", float, "f", "rcp.approx.ftz.f32")

#undef PEERLANE_LOAD
#undef PEERLANE_STORE
#undef PEERLANE_UPDATE
#undef PEERLANE_PACK
#undef PEERLANE_FUNCTION

}  // namespace ptx
}  // namespace peerlane
