// Two ranks: a message is made in shared memory and sent by a bulk copy; the receiver reads it with ordinary loads. Two buffers take turns.
#include "protocol.cuh"

#include <peerlane/ptx/ptx_async.cuh>

enum Twin : u32 {
    honest,
    no_proxy_fence,  // the copy may miss what was written to shared memory
    late_fence,      // the fence is on the wrong side of the barrier: in the thread that copies, before it knows of the others' stores
    partial_wait,    // waits until the source has been read, then signals
    no_wait,         // signals at once
    not_committed,   // the copy is in no group when the thread waits
    reused_source,   // writes shared memory again while the copy may read it
};

extern "C" __global__ void bulk_push(const __grid_constant__ Arena arena, const __grid_constant__ Places at, u32* out, u32 twin) {
    u32* tile = reinterpret_cast<u32*>(ptx::dynamic_shared());
    u32* epoch_at = reinterpret_cast<u32*>(arena.local(at.epochs)) + blockIdx.x;
    const u32 epoch = *epoch_at + 1;
    const u32 rank = arena.rank, peer = 1 - rank;
    const u64 place = at.data + (u64(epoch & 1) * gridDim.x + blockIdx.x) * blockDim.x * sizeof(u32);

    tile[threadIdx.x] = message(rank, epoch, threadIdx.x);
    if (twin == late_fence) {
        if (threadIdx.x == 0) ptx::fence_proxy_async_shared();
    } else if (twin != no_proxy_fence) {
        ptx::fence_proxy_async_shared();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::bulk_store(arena.peer(peer, place), tile, blockDim.x * sizeof(u32));
        if (twin != not_committed) ptx::bulk_commit();
        if (twin == partial_wait) {
            ptx::bulk_wait_read<0>();
        } else if (twin != no_wait && twin != reused_source) {
            ptx::bulk_wait<0>();
        }
        if (twin == reused_source) {
            tile[0] = 0;
            ptx::bulk_wait<0>();
        }
        ptx::fence_system();
        ptx::store_relaxed_system(flag(arena, at, peer, rank), epoch);
        wait_for(arena, flag(arena, at, rank, peer), peer, epoch);
        ptx::fence_system();
    }
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = reinterpret_cast<const u32*>(arena.local(place))[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) *epoch_at = epoch;
}
