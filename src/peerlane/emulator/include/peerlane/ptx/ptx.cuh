// The kit's <peerlane/ptx/ptx.cuh> for the CPU: the same names, in terms of what the emulator offers.
#pragma once

#include <peerlane_emulator/cuda.h>

namespace peerlane {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Vec16 {
    u32 word[4];
};

namespace ptx {

// ---- clocks and control

PEERLANE_INLINE u64 globaltimer() { return emulator::peerlane_time(); }
PEERLANE_INLINE void sleep(u32) { emulator::peerlane_pause(); }
[[noreturn]] PEERLANE_INLINE void trap() { emulator::peerlane_trap(); }
PEERLANE_INLINE bool elect_one() { return emulator::lane() == 0; }
PEERLANE_INLINE u32 uniform(u32 value) { return value; }
PEERLANE_INLINE u32 lanes_alike(u32 among, u32 value, u32 bit) {
    const u32 lanes = __ballot_sync(0xffffffffu, value & bit);
    return among & (value & bit ? lanes : ~lanes);
}
PEERLANE_INLINE void barrier_sync(u32 number, u32 threads) { emulator::peerlane_barrier(number, threads, true); }
PEERLANE_INLINE void barrier_arrive(u32 number, u32 threads) { emulator::peerlane_barrier(number, threads, false); }

// ---- fences

PEERLANE_INLINE void fence_system() { emulator::peerlane_fence(emulator::system_scope); }
PEERLANE_INLINE void fence_gpu() { emulator::peerlane_fence(emulator::gpu_scope); }
PEERLANE_INLINE void fence_proxy_async() { emulator::peerlane_proxy_fence(emulator::all_proxies); }
PEERLANE_INLINE void fence_proxy_async_shared() { emulator::peerlane_proxy_fence(emulator::shared_proxy); }

// ---- accesses with an order and a scope

PEERLANE_INLINE u32 load_relaxed_system(const u32* address) { return emulator::load(address, emulator::system_scope); }
PEERLANE_INLINE u64 load_relaxed_system(const u64* address) { return emulator::load(address, emulator::system_scope); }
PEERLANE_INLINE u32 load_acquire_system(const u32* address) { return emulator::load(address, emulator::system_scope, emulator::acquire); }
PEERLANE_INLINE void store_relaxed_system(u32* address, u32 value) { emulator::store(address, value, emulator::system_scope); }
PEERLANE_INLINE u32 load_relaxed_gpu(const u32* address) { return emulator::load(address, emulator::gpu_scope); }
PEERLANE_INLINE u32 load_acquire_gpu(const u32* address) { return emulator::load(address, emulator::gpu_scope, emulator::acquire); }
PEERLANE_INLINE void store_relaxed_gpu(u32* address, u32 value) { emulator::store(address, value, emulator::gpu_scope); }
PEERLANE_INLINE u32 add_relaxed_gpu(u32* address, u32 value) {
    return emulator::update(address, emulator::gpu_scope, [value](u32 old) { return old + value; });
}
PEERLANE_INLINE void add_floats_relaxed_gpu(float* address, const Vec16& value) {
    for (int i = 0; i < 4; ++i) {
        const float term = __builtin_bit_cast(float, value.word[i]);
        emulator::update(address + i, emulator::gpu_scope, [term](float old) { return old + term; });
    }
}
PEERLANE_INLINE u32 add_relaxed_system(u32* address, u32 value) {
    return emulator::update(address, emulator::system_scope, [value](u32 old) { return old + value; });
}
PEERLANE_INLINE u32 exchange_relaxed_system(u32* address, u32 value) {
    return emulator::update(address, emulator::system_scope, [value](u32) { return value; });
}
PEERLANE_INLINE u32 load_relaxed_block(const u32* address) { return emulator::load(address, emulator::block_scope); }
PEERLANE_INLINE void store_release_block(u32* address, u32 value) { emulator::store(address, value, emulator::block_scope, emulator::release); }
PEERLANE_INLINE Vec16 load_relaxed_system(const Vec16* address) { return emulator::load(address, emulator::system_scope); }
PEERLANE_INLINE void store_relaxed_system(Vec16* address, const Vec16& value) { emulator::store(address, value, emulator::system_scope); }

// ---- conversions

PEERLANE_INLINE u32 pack_bf16x2(float low, float high) { return emulator::narrow_bf16(low) | u32(emulator::narrow_bf16(high)) << 16; }
PEERLANE_INLINE u32 pack_f16x2(float low, float high) { return emulator::narrow_f16(low) | u32(emulator::narrow_f16(high)) << 16; }
PEERLANE_INLINE void unpack_f16x2(u32 word, float& low, float& high) {
    low = emulator::widen_f16(static_cast<u16>(word));
    high = emulator::widen_f16(static_cast<u16>(word >> 16));
}

PEERLANE_INLINE u32 unpack_e4m3x2(u16 pair) { return pack_f16x2(emulator::widen_e4m3(pair & 0xff), emulator::widen_e4m3(pair >> 8)); }
PEERLANE_INLINE u32 unpack_e5m2x2(u16 pair) { return u32(pair & 0xff) << 8 | u32(pair >> 8) << 24; }
PEERLANE_INLINE u16 pack_e4m3x2(float low, float high) {
    return static_cast<u16>(emulator::narrow_float8<3, 7, 448>(low) | emulator::narrow_float8<3, 7, 448>(high) << 8);
}
PEERLANE_INLINE u16 pack_e5m2x2(float low, float high) {
    return static_cast<u16>(emulator::narrow_float8<2, 15, 57344>(low) | emulator::narrow_float8<2, 15, 57344>(high) << 8);
}

PEERLANE_INLINE float exp2(float x) { return __builtin_exp2f(x); }
PEERLANE_INLINE float log2(float x) { return __builtin_log2f(x); }
PEERLANE_INLINE float reciprocal(float x) { return 1.0f / x; }

// The block's dynamic shared memory.
PEERLANE_INLINE char* dynamic_shared() { return emulator::peerlane_dynamic_shared(); }

}  // namespace ptx
}  // namespace peerlane
