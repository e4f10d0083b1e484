// Copies that run beside the threads that start them: mbarriers, and bulk copies between shared and global memory (a peer's too).
//
// Pointers to shared memory are ordinary (generic) pointers here. Bulk copies move multiples of 16 bytes between 16-byte aligned addresses.
// Only one thread starts a copy, and the same thread commits and waits for it. Needs sm_90.
#pragma once

#include <peerlane/ptx/ptx.cuh>

namespace peerlane {
namespace ptx {

// The address within the block's shared memory window, as instructions on `.shared` want it.
__device__ inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- mbarriers: a phase ends when all arrivals have come and all announced bytes have landed ----------------------------------------------

__device__ inline void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// After all inits, before the barrier that shows them to the other threads: makes them visible to the asynchronous proxy as well.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, and `bytes` more that copies will bring before the phase can end.
__device__ inline void mbarrier_arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended; suspends the thread for a short time that the hardware chooses. Acquires what came before
// the arrivals, and the bytes that copies have brought.
__device__ inline bool mbarrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// ---- clusters: neighbouring blocks of a grid that run at the same time and reach each other's shared memory ---------------------------------

// This block's number in its cluster. Blocks of a cluster have the same layout of shared memory.
__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// By all threads of the cluster's blocks: until all have come. Shows them the mbarriers that were initialised before mbarrier_init_fence, and
// orders no other memory. A block may end only when it knows that no other copies to it or arrives at its mbarriers any more.
__device__ inline void cluster_barrier() { asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory"); }

// An arrival at the mbarrier that lies in block `rank` of the cluster where `barrier` lies in this one. It says that this thread has read what
// it waited for, and publishes no writes: that would take a fence of the whole GPU.
__device__ inline void mbarrier_arrive_at(u64* barrier, u32 rank) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\tmbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(
            shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------------------------

// Global (own or a peer's) to shared memory; the bytes count towards the mbarrier's phase when they have landed.
__device__ inline void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Shared to global memory. What threads wrote to shared memory must be behind fence_proxy_async_shared and a barrier.
__device__ inline void bulk_store(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// The same, adding to what is there, element by element, in no fixed order.
enum class BulkAdd { f32, f16, bf16, u32 };

template <BulkAdd type>
__device__ inline void bulk_add(void* global, const void* shared, u32 bytes) {
    const u32 source = shared_address(shared);
    if constexpr (type == BulkAdd::f32) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(source), "r"(bytes) : "memory");
    } else if constexpr (type == BulkAdd::f16) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(global), "r"(source), "r"(bytes)
                     : "memory");
    } else if constexpr (type == BulkAdd::bf16) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(global), "r"(source), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(global), "r"(source), "r"(bytes) : "memory");
    }
}

// Closes this thread's group of bulk stores.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `pending` of this thread's newest groups are under way: all older ones have been written, where they were to go.
template <int pending>
__device__ inline void bulk_wait() {
#if __CUDA_ARCH__ >= 900  // before, no bulk copy can be pending
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// The same, but only that shared memory has been read and may be written again. Says nothing about what peers can see.
template <int pending>
__device__ inline void bulk_wait_read() {
#if __CUDA_ARCH__ >= 900  // before, no bulk copy can be pending
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#endif
}

}  // namespace ptx
}  // namespace peerlane
