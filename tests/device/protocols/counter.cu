// A barrier of all blocks of all ranks, by one counter in rank 0's memory that only grows. Every block leaves a word before it and reads its
// right neighbour's word after it.
#include "protocol.cuh"

enum Twin : u32 {
    honest,
    counter_reset,   // rank 0 sets the counter back after the barrier
    equality_poll,   // waits for one value of a counter that may have gone on
    narrow_counter,  // adds for this GPU's threads only
    too_few,         // one arrival fewer than there are blocks is enough
};

extern "C" __global__ void counter(const __grid_constant__ Arena arena, const __grid_constant__ Places at, u32* out, u32 twin) {
    if (threadIdx.x != 0) return;
    u32* epoch_at = reinterpret_cast<u32*>(arena.local(at.epochs)) + blockIdx.x;
    const u32 epoch = *epoch_at + 1;
    const u32 blocks = gridDim.x * arena.world_size;
    const u32 self = arena.rank * gridDim.x + blockIdx.x, neighbour = (self + 1) % blocks;
    u32* count = reinterpret_cast<u32*>(arena.peer(0, at.flags));
    const auto word = [&](u32 block) {
        return reinterpret_cast<u32*>(arena.peer(block / gridDim.x, at.data)) + (u64(epoch & 1) * gridDim.x + block % gridDim.x);
    };
    *word(self) = message(self, epoch, 0);
    const u32 target = (twin == counter_reset ? 1 : epoch) * blocks - (twin == too_few ? 1 : 0);
    ptx::fence_system();
    if (twin == narrow_counter) {
        ptx::add_relaxed_gpu(count, 1);
    } else {
        ptx::add_relaxed_system(count, 1);
    }
    if (twin == equality_poll) {
        // Meets the others once more, so that the counter has gone on whenever it looks.
        ptx::fence_system();
        ptx::add_relaxed_system(count, blocks);
        Deadline deadline;
        u32 seen;
        while ((seen = ptx::load_relaxed_system(count)) != target) {
            if (deadline.expired(arena)) fail(arena, Awaited{whole_block, 0, blockIdx.x, target}, seen);
        }
    } else {
        wait_for(arena, count, 0, target);
    }
    ptx::fence_system();
    if (twin == counter_reset && self == 0) ptx::store_relaxed_system(count, 0);
    out[blockIdx.x] = *word(neighbour);
    *epoch_at = epoch;
}
