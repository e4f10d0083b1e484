// Messages to memory of other nodes, which no load or store reaches. NVSHMEM carries them in sources that peerlane.device.nvshmem compiles.
// Without it they compile, for the sake of a kernel's registers and of the emulator, and trap.
//
// Every function takes the caller's own address of what is meant at the peer, and the peer's, which only the emulator uses.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {
namespace ptx {

#ifdef PEERLANE_NVSHMEM
__device__ inline void remote_put(void* own, void*, int q, const void* source, u64 bytes) { nvshmem_putmem_nbi(own, source, bytes, q); }
__device__ inline void remote_signal(u64* own, u64*, int q, u64 add) {
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(own), add, NVSHMEM_SIGNAL_ADD, q);
}
__device__ inline void remote_put_signal(void* own, void*, int q, const void* source, u64 bytes, u64* counter, u64*, u64 add) {
    nvshmem_putmem_signal_nbi(own, source, bytes, reinterpret_cast<uint64_t*>(counter), add, NVSHMEM_SIGNAL_ADD, q);
}
__device__ inline void remote_flush() { nvshmem_quiet(); }
__device__ inline u64 remote_counter(u64* counter) {
    uint64_t* signal = reinterpret_cast<uint64_t*>(counter);
    const u64 value = nvshmem_signal_fetch(signal);
    nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, value);  // which holds: what came before the signal is there to be read
    return value;
}
#else
__device__ inline void remote_put(void*, void*, int, const void*, u64) { trap(); }
__device__ inline void remote_signal(u64*, u64*, int, u64) { trap(); }
__device__ inline void remote_put_signal(void*, void*, int, const void*, u64, u64*, u64*, u64) { trap(); }
__device__ inline void remote_flush() { trap(); }
__device__ inline u64 remote_counter(u64* counter) { return *counter; }
#endif

}  // namespace ptx
}  // namespace peerlane
