// One PTX instruction (or one idiom of two) per function; nothing here knows about ranks or protocols.
//
// Headers of peerlane include no toolkit header, so NVRTC compiles them in tens of milliseconds and needs no include path but this one.
#pragma once

namespace peerlane {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Sixteen bytes, the widest access that is one indivisible memory operation.
struct alignas(16) Vec16 {
    u32 word[4];
};

namespace ptx {

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

// Release and acquire in one, for the threads of every GPU and the host.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline u32 load_relaxed_system(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_relaxed_system(u32* address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// A 128-bit scalar: never torn, unlike a vector of four words.
__device__ inline Vec16 load_relaxed_system(const Vec16* address) {
    Vec16 value;
    asm volatile(
        "{\n\t.reg .b128 whole;\n\t.reg .b64 low, high;\n\t"
        "ld.relaxed.sys.global.b128 whole, [%4];\n\t"
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

}  // namespace ptx
}  // namespace peerlane
