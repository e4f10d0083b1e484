// A sum over two nodes of two ranks: neighbours by the arena, leaders of the nodes by messages. TWIN says which variant this is.
#include <peerlane/comm.cuh>
#include <peerlane/peers/remote.cuh>

using namespace peerlane;

enum Twin : u32 {
    flushes,           // right: put, flush, signal
    signals_with_put,  // right: the signal comes with the bytes, and the flush before the outbox is written again
    never_flushes,     // the signal may overtake the bytes
    reuses_source,     // the outbox is written again while its bytes may still be read
    has_one_inbox,     // the next launch's bytes may arrive while these are read
    maps_other_node,   // there is no address for memory of another node
    stores_remotely,   // nor does a store reach it
};

struct Places {
    u64 part, ready, total, done;    // in the arena
    u64 outbox, inboxes, counter;  // in memory of the second tier
};

__device__ inline u32* words(char* at) { return reinterpret_cast<u32*>(at); }

__device__ void send(const Arena& arena, int q, u64 flag, u32 epoch) {
    __syncthreads();
    if (threadIdx.x) return;
    ptx::fence_system();
    ptx::store_relaxed_system(words(arena.peer(q, flag)), epoch);
}

__device__ void await(const Arena& arena, u64 flag, u32 epoch) {
    if (threadIdx.x == 0) {
        while (ptx::load_relaxed_system(words(arena.local(flag))) < epoch) {}
        ptx::fence_system();
    }
    __syncthreads();
}

extern "C" __global__ void sum_over_nodes(
    const __grid_constant__ Arena arena, const __grid_constant__ Remote remote, const __grid_constant__ Places at, const u32* in, u32* out, u32 epoch) {
    const u32 neighbour = arena.rank ^ 1, other_leader = arena.rank ^ 2, i = threadIdx.x;
    if (arena.rank & 1) {
        words(arena.peer(neighbour, at.part))[i] = in[i];
        send(arena, neighbour, at.ready, epoch);
        await(arena, at.done, epoch);
        out[i] = words(arena.local(at.total))[i];
        return;
    }
    await(arena, at.ready, epoch);
    u32* outbox = words(remote.local(at.outbox));
    const u64 inbox = at.inboxes + (TWIN == has_one_inbox ? 0 : epoch % 2 * line_bytes);
    outbox[i] = in[i] + words(arena.local(at.part))[i];
    __syncthreads();
    if (i == 0) {
        if (TWIN == maps_other_node) words(arena.peer(other_leader, at.total))[0] = outbox[0];
        if (TWIN == stores_remotely) words(remote.local(inbox) + (u64(other_leader) - arena.rank) * remote.stride)[0] = outbox[0];
        if (TWIN == signals_with_put || TWIN == reuses_source) {
            remote.put_signal(other_leader, inbox, outbox, line_bytes, at.counter, 1);
        } else {
            remote.put(other_leader, inbox, outbox, line_bytes);
            if (TWIN != never_flushes) remote.flush();
            remote.signal(other_leader, at.counter, 1);
        }
        remote.wait(at.counter, epoch);
    }
    __syncthreads();
    const u32 total = outbox[i] + words(remote.local(inbox))[i];
    out[i] = total;
    words(arena.peer(neighbour, at.total))[i] = total;
    if (i == 0 && TWIN != reuses_source) remote.flush();
    send(arena, neighbour, at.done, epoch);
}
