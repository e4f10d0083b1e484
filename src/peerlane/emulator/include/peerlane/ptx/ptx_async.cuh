// The kit's <peerlane/ptx/ptx_async.cuh> for the CPU: copies that read and write at a time of their own between issue and wait.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {
namespace ptx {

PEERLANE_INLINE u32 shared_address(const void* pointer) { return emulator::peerlane_shared_address(pointer); }

// ---- mbarriers

PEERLANE_INLINE void mbarrier_init(u64* barrier, u32 arrivals) { emulator::peerlane_mbarrier_init(barrier, arrivals); }
PEERLANE_INLINE void mbarrier_init_fence() { emulator::peerlane_mbarrier_init_fence(); }
PEERLANE_INLINE void mbarrier_arrive(u64* barrier) { emulator::peerlane_mbarrier_arrive(barrier, 0); }
PEERLANE_INLINE void mbarrier_arrive_expect(u64* barrier, u32 bytes) { emulator::peerlane_mbarrier_arrive(barrier, bytes); }
PEERLANE_INLINE bool mbarrier_try_wait(u64* barrier, u32 parity) { return emulator::peerlane_mbarrier_try_wait(barrier, parity); }

// ---- clusters

PEERLANE_INLINE u32 cluster_rank() { return emulator::peerlane_cluster_rank(); }
PEERLANE_INLINE void cluster_barrier() { emulator::peerlane_cluster_arrive(false), emulator::peerlane_cluster_wait(); }
PEERLANE_INLINE void mbarrier_arrive_at(u64* barrier, u32 rank) {
    emulator::peerlane_mbarrier_arrive(static_cast<u64*>(emulator::peerlane_cluster_pointer(barrier, rank)), 0);
}

// ---- bulk copies

PEERLANE_INLINE void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
    emulator::peerlane_async_bulk(shared, global, bytes, emulator::Combine::replace, barrier);
}

PEERLANE_INLINE void bulk_store(void* global, const void* shared, u32 bytes) {
    emulator::peerlane_async_bulk(global, shared, bytes, emulator::Combine::replace, nullptr);
}

enum class BulkAdd { f32, f16, bf16, u32 };

template <BulkAdd type>
PEERLANE_INLINE void bulk_add(void* global, const void* shared, u32 bytes) {
    constexpr emulator::Combine how = type == BulkAdd::f32    ? emulator::Combine::add_f32
                                      : type == BulkAdd::f16  ? emulator::Combine::add_f16
                                      : type == BulkAdd::bf16 ? emulator::Combine::add_bf16
                                                              : emulator::Combine::add_u32;
    emulator::peerlane_async_bulk(global, shared, bytes, how, nullptr);
}

PEERLANE_INLINE void bulk_commit() { emulator::peerlane_async_commit(emulator::bulk_queue); }

template <int pending>
PEERLANE_INLINE void bulk_wait() {
    emulator::peerlane_async_wait(emulator::bulk_queue, pending, false);
}

template <int pending>
PEERLANE_INLINE void bulk_wait_read() {
    emulator::peerlane_async_wait(emulator::bulk_queue, pending, true);
}

}  // namespace ptx
}  // namespace peerlane
