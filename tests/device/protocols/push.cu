// Every rank stores a message into every other rank's memory and takes in what the others sent. Two buffers take turns, so that a rank that is
// ahead does not write over what has not been read yet: to be two epochs ahead it would need a signal that its peer gives after reading.
#include "protocol.cuh"

enum Twin : u32 {
    honest,
    no_release,        // no fence between the stores and the signal
    no_acquire,        // no fence between the wait and the loads
    narrow_fence,      // fences for this GPU's threads only
    narrow_flag,       // the flag is stored and loaded for this GPU only
    no_barrier,        // threads that have not waited read without a barrier after the one that has
    early_signal,      // signals before all threads have stored
    one_buffer,        // where two are needed
    wrong_slot,        // takes in the place of the epoch before
    wrong_flag,        // signals the flag of another source
    host_epoch,        // the epoch is an argument, and the launch is replayed
    plain_flag,        // the flag is stored like data
};

extern "C" __global__ void push(const __grid_constant__ Arena arena, const __grid_constant__ Places at, u32* out, u32 from_host, u32 twin) {
    u32* epoch_at = reinterpret_cast<u32*>(arena.local(at.epochs)) + blockIdx.x;
    const u32 epoch = twin == host_epoch ? from_host : *epoch_at + 1;
    const u32 W = arena.world_size, rank = arena.rank;
    // Words of a block in one buffer: W sources of one word a thread.
    const u32 words = W * blockDim.x;
    const auto buffer = [&](int owner, u32 of_epoch) {
        const u32 turn = twin == one_buffer ? 0 : of_epoch & 1;
        return reinterpret_cast<u32*>(arena.peer(owner, at.data)) + (u64(turn) * gridDim.x + blockIdx.x) * words;
    };
    for (u32 q = 0; q < W; ++q) {
        if (q != rank) buffer(q, epoch)[rank * blockDim.x + threadIdx.x] = message(rank, epoch, threadIdx.x);
    }
    if (twin != early_signal) __syncthreads();
    if (threadIdx.x < W && threadIdx.x != rank) {
        const u32 q = threadIdx.x;
        if (twin == narrow_fence) {
            ptx::fence_gpu();
        } else if (twin != no_release) {
            ptx::fence_system();
        }
        u32* theirs = flag(arena, at, q, twin == wrong_flag ? q : rank);
        u32* mine = flag(arena, at, rank, q);
        if (twin == plain_flag) {
            *theirs = epoch;
        } else if (twin == narrow_flag) {
            ptx::store_relaxed_gpu(theirs, epoch);
        } else {
            ptx::store_relaxed_system(theirs, epoch);
        }
        wait_for(arena, mine, q, epoch);
        if (twin == narrow_fence) {
            ptx::fence_gpu();
        } else if (twin != no_acquire) {
            ptx::fence_system();
        }
    }
    if (twin != no_barrier) __syncthreads();
    u32 sum = message(rank, epoch, threadIdx.x);
    for (u32 q = 0; q < W; ++q) {
        if (q != rank) sum += buffer(rank, twin == wrong_slot ? epoch - 1 : epoch)[q * blockDim.x + threadIdx.x];
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) *epoch_at = epoch;
}
