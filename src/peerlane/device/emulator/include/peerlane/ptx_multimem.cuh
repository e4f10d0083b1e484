// The kit's <peerlane/ptx_multimem.cuh> for the CPU. No emulated arena has a multicast address, so that none of these may be reached.
#pragma once

#include <peerlane/ptx.cuh>

namespace peerlane {
namespace ptx {

[[noreturn]] PEERLANE_INLINE Vec16 multimem_load_sum_bf16(const void*) { trap(); }
[[noreturn]] PEERLANE_INLINE Vec16 multimem_load_sum_f16(const void*) { trap(); }
[[noreturn]] PEERLANE_INLINE Vec16 multimem_load_sum_f32(const void*) { trap(); }
[[noreturn]] PEERLANE_INLINE void multimem_store(void*, const Vec16&) { trap(); }
[[noreturn]] PEERLANE_INLINE void multimem_store_flag(u32*, u32) { trap(); }

}  // namespace ptx
}  // namespace peerlane
