// Two ranks: several messages are made in shared memory, one after the other, and sent through a queue of stores; each is signalled while newer ones
// are on their way. The receiver reads each as it comes. Two buffers take turns.
#include "protocol.cuh"

enum Twin : u32 {
    honest,
    reused_tile,    // writes to a tile of a step that may be under way
    foreign_store,  // starts a store beside the queue, which then takes it for one of its own
    no_flush,       // waits for an answer that the other side gives when it has had all signals
};

extern "C" __global__ void queue_push(const __grid_constant__ Arena arena, const __grid_constant__ Places at, u32* out, u32 twin) {
    constexpr u32 in_flight = 2, steps = 5;
    u32* tiles = reinterpret_cast<u32*>(ptx::dynamic_shared());
    u32* epoch_at = reinterpret_cast<u32*>(arena.local(at.epochs)) + blockIdx.x;
    const u32 epoch = *epoch_at + 1;
    const u32 rank = arena.rank, peer = 1 - rank;
    const u32 tile_bytes = blockDim.x * sizeof(u32);
    const auto place = [&](u32 step) { return at.data + ((u64(epoch & 1) * gridDim.x + blockIdx.x) * steps + step) * tile_bytes; };
    const Peers<2, Warp> peers(arena, at.flags);
    StoreQueue<2, in_flight> queue(arena, at.flags);

    for (u32 step = 0; step < steps; ++step) {
        u32* tile = tiles + step % (twin == reused_tile ? in_flight : in_flight + 1) * blockDim.x;
        tile[threadIdx.x] = message(rank, epoch, step * blockDim.x + threadIdx.x);
        queue.store(peer, place(step), tile, tile_bytes);
        queue.end_step(Signal{only(peer), blockIdx.x, epoch * steps + step});
        if (twin == foreign_store) peers.store_async(rank, at.data + (2 * gridDim.x + blockIdx.x) * steps * tile_bytes, tile, tile_bytes);
    }
    if (twin != no_flush) queue.flush();
    u32 total = 0;
    for (u32 step = 0; step < steps; ++step) {
        peers.wait(peer, blockIdx.x, epoch * steps + step);
        total += reinterpret_cast<const u32*>(arena.local(place(step)))[threadIdx.x];
    }
    if (twin == no_flush) queue.flush();
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
    __syncwarp();
    if (threadIdx.x == 0) *epoch_at = epoch;
}
