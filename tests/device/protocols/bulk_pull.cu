// Every rank writes a message into its own memory with ordinary stores; its neighbour fetches it by a bulk copy. A barrier before the copy says
// that the message is there, one at the end that it has been fetched and may be written again.
#include "protocol.cuh"

#include <peerlane/ptx/ptx_async.cuh>

enum Twin : u32 {
    honest,
    no_proxy_fence,      // between the wait and the copy
    shared_proxy_fence,  // one for shared memory alone
    no_landing,          // reads what the copy brings without waiting for it
    no_exit_barrier,     // the message of the next launch may overwrite this one's
    leaves_copy,         // the block ends while the copy may still write to its shared memory
};

__device__ inline void barrier(const Arena& arena, const Places& at, u32 number) {
    __syncthreads();
    if (threadIdx.x < arena.world_size && threadIdx.x != arena.rank) {
        ptx::fence_system();
        ptx::store_relaxed_system(flag(arena, at, threadIdx.x, arena.rank), number);
        wait_for(arena, flag(arena, at, arena.rank, threadIdx.x), threadIdx.x, number);
        ptx::fence_system();
    }
    __syncthreads();
}

extern "C" __global__ void bulk_pull(const __grid_constant__ Arena arena, const __grid_constant__ Places at, u32* out, u32 twin) {
    __shared__ alignas(8) u64 landed;
    u32* tile = reinterpret_cast<u32*>(ptx::dynamic_shared());
    u32* epoch_at = reinterpret_cast<u32*>(arena.local(at.epochs)) + blockIdx.x;
    const u32 epoch = *epoch_at + 1;
    const u32 rank = arena.rank, source = (rank + 1) % arena.world_size;
    const u64 place = at.data + u64(blockIdx.x) * blockDim.x * sizeof(u32);

    reinterpret_cast<u32*>(arena.local(place))[threadIdx.x] = message(rank, epoch, threadIdx.x);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&landed, 1);
        ptx::mbarrier_init_fence();
    }
    barrier(arena, at, 2 * epoch - 1);
    if (threadIdx.x == 0) {
        if (twin == shared_proxy_fence) {
            ptx::fence_proxy_async_shared();
        } else if (twin != no_proxy_fence) {
            ptx::fence_proxy_async();
        }
        ptx::mbarrier_arrive_expect(&landed, blockDim.x * sizeof(u32));
        ptx::bulk_load(tile, arena.peer(source, place), blockDim.x * sizeof(u32), &landed);
    }
    if (twin == leaves_copy) return;
    if (twin != no_landing) {
        while (!ptx::mbarrier_try_wait(&landed, 0)) {}
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = tile[threadIdx.x];
    if (twin == no_landing) {
        while (!ptx::mbarrier_try_wait(&landed, 0)) {}
    }
    if (twin != no_exit_barrier) barrier(arena, at, 2 * epoch);
    if (threadIdx.x == 0) *epoch_at = epoch;
}
