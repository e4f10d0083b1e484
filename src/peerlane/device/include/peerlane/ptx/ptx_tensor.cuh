// Copies of boxes of tensors between shared and global memory (a peer's too), by tensor maps. Needs sm_90.
//
// A tensor map describes a tensor of up to five dimensions in global memory and the box that one copy moves; `peerlane.device.host.tensor_map` makes
// it. Coordinates are of the box's first element, the innermost dimension first. What a load finds outside the tensor is zero, and what a
// store would write outside is left out, so ragged edges need no care; the bytes that a load announces to its mbarrier are always the whole
// box's. Only one thread starts a copy, and the same thread commits and waits for its stores (bulk_commit, bulk_wait of ptx_async.cuh).
#pragma once

#include <peerlane/ptx/ptx_async.cuh>

namespace peerlane {

// A kernel argument: in a `const __grid_constant__` parameter, which has an address that the copy unit can read.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

namespace ptx {

// ---- global to shared; the box's bytes count towards the mbarrier's phase when they have landed -------------------------------------------

__device__ inline void tensor_load(void* shared, const TensorMap* map, u64* barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
                 : "memory");
}

__device__ inline void tensor_load(void* shared, const TensorMap* map, u64* barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ inline void tensor_load(void* shared, const TensorMap* map, u64* barrier, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`: to where `shared` lies in it, counted at its own `barrier`.
__device__ inline void tensor_load_to(u16 blocks, void* shared, const TensorMap* map, u64* barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::
            "r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

// ---- shared to global; what threads wrote to shared memory must be behind fence_proxy_async_shared and a barrier --------------------------

__device__ inline void tensor_store(const TensorMap* map, const void* shared, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(shared_address(shared)),
                 "r"(x), "r"(y)
                 : "memory");
}

__device__ inline void tensor_store(const TensorMap* map, const void* shared, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ inline void tensor_store(const TensorMap* map, const void* shared, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

}  // namespace ptx
}  // namespace peerlane
