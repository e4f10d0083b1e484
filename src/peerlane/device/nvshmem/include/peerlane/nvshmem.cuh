// NVSHMEM's headers, as NVRTC can read them, and waits with a time limit. Read before the first line of every source that
// peerlane.device.nvshmem compiles.
#pragma once

#ifdef __CUDACC_RTC__
// NVSHMEM's library was compiled for Linux, where uint64_t is unsigned long. NVRTC's headers say unsigned long long, under which name the
// library has no functions. So theirs get other names, and the type is what it is on Linux.
#define uint64_t peerlane_nvrtc_uint64_t
#define int64_t peerlane_nvrtc_int64_t
#include <cuda/std/cstdint>
#include <cuda_awbarrier_helpers.h>
#undef uint64_t
#undef int64_t
using uint64_t = unsigned long;
using int64_t = long;
namespace cuda::std {
using ::int64_t;
using ::uint64_t;
}  // namespace cuda::std

// Headers of versions before 3.5 ask for these in namespace std, which NVRTC does not fill.
#include <cuda/std/type_traits>
namespace std {
using cuda::std::is_integral;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std
#endif

#include <nvshmem.h>
#include <nvshmemx.h>

#include <peerlane/ptx/ptx.cuh>

#define PEERLANE_NVSHMEM 1

namespace peerlane {

// Returns when the signal is `value` or more: what was put before it is there to be read, by the whole block behind a barrier of its threads.
// NVSHMEM's own waits have no limit; after `limit_ns` this one traps, and the launch fails.
__device__ inline void wait_signal(uint64_t* signal, uint64_t value, u64 limit_ns = 10'000'000'000ull) {
    const u64 end = ptx::globaltimer() + limit_ns;
    while (nvshmem_signal_fetch(signal) < value) {
        if (ptx::globaltimer() > end) __trap();
    }
    // NVSHMEM's wait, which ends at once, orders nothing between this thread and others of its block: their reads may find old lines in L1.
    nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, value);
    ptx::fence_system();
}

}  // namespace peerlane
